"""The draft loop of drafters that run a part of the model: one pass per token, until the controller or the limit stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller, Decision, DraftDistribution
from decoding.drafters.contract import Proposal
from decoding.runners.contract import Outputs, Written
from decoding.text import Request, TokenSequence

Step = Callable[[int, bool], Outputs]
"""Runs the draft on the sequence and its first drafts, as many as the first argument says; logits are [1, vocabulary].

The second argument is `looks` of `EagerRunner.run`.
"""

Write = Callable[[int], Written]
"""Runs the draft after the sequence as often as the argument says, greedily."""


def propose(
    step: Step,
    write: Write,
    sequence: TokenSequence,
    cache: KVCache,
    controller: Controller,
    request: Request,
    limit: int,
    states: Sequence[Tensor],
) -> Proposal:
    """Write drafts after the sequence, token by token; several at once if greedy and nothing looks at their distributions.

    `states` are the boundary states [.., n, hidden] of the passes that have run, those whose distributions the controller did not
    want included.
    """
    acceptance, shaping = request.acceptance, request.shaping
    limit = min(limit, controller.limit())
    looks, most_likely = controller.looks_at_drafts, request.takes_most_likely
    if limit > 0 and most_likely and not looks:
        sequence.write(0, write(limit).token_ids)
        return Proposal(limit, None, _joined(states))
    probabilities: list[Tensor] = []
    num_drafted = 0
    decision = Decision.CONTINUE
    while num_drafted < limit and decision is Decision.CONTINUE:
        outputs = step(num_drafted, looks)
        scores = outputs.logits[0] if most_likely else shaping.one(sequence, num_drafted, outputs.logits)
        if not acceptance.is_greedy:
            scores = _proper(scores)
        known = None if shaping.processors else outputs.confidence
        decision = controller.decide(num_drafted, DraftDistribution(scores, sequence.read, known))
        if decision is Decision.STOP:
            break
        token, distribution = (outputs.choices, None) if most_likely else acceptance.choose(scores)
        if distribution is not None:
            probabilities.append(distribution)
        sequence.write(num_drafted, token)
        num_drafted += 1
    sampled_from = torch.stack(probabilities) if probabilities else None
    return Proposal(num_drafted, sampled_from, _joined(states))


def _joined(states: Sequence[Tensor]) -> Tensor | None:
    return torch.cat(list(states), dim=-2) if states else None


def _proper(scores: Tensor) -> Tensor:
    """Return scores [vocabulary] that have a softmax: equal ones if the draft has overflowed or forbids every token.

    A token may be sampled from any distribution, as the target judges it by the one that it was sampled from.
    """
    return torch.where(torch.logsumexp(scores.float(), dim=-1).isfinite(), scores, torch.zeros_like(scores))
