"""The draft loop of drafters that run a part of the model: one pass per token, until the controller or the limit stops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.draft_length import Controller, Decision, DraftDistribution
from decoding.drafters.leaves import LeafGatherer
from decoding.runners.contract import Outputs, Written
from decoding.text import Shaping, TokenSequence

Step = Callable[[int, bool], Outputs]
"""Runs the draft on the sequence and its first drafts, as many as the first argument says; logits are [1, vocabulary].

The second argument is `looks` of `EagerRunner.run`.
"""

Write = Callable[[int, int, bool], Written]
"""Runs the draft after the sequence and its first drafts, as often as the second argument says, greedily.

The first and the third argument are as in `Step`.
"""


def propose(
    step: Step,
    write: Write,
    sequence: TokenSequence,
    controller: Controller,
    shaping: Shaping,
    acceptance: Acceptance,
    limit: int,
    look_every: int | None = None,
    gatherer: LeafGatherer | None = None,
) -> tuple[int, Tensor | None]:
    """Write drafts after the sequence, token by token; several at once if greedy and nothing looks at their distributions.

    A `gatherer` looks at all of them: it chooses the tokens, and keeps the leaves beside them.

    For `look_every` see `decoding.runners.features.SpeedFeatures`.

    Returns the number of drafts and the probabilities [num_drafted, vocabulary] they were sampled from (None if greedy or if
    nothing was drafted). The passes whose distributions the controller did not want have run too.
    """
    limit = min(limit, controller.limit())
    looks, most_likely = controller.looks_at_drafts, acceptance.is_greedy and not shaping.processors
    if limit > 0 and most_likely and not looks and gatherer is None:
        sequence.write_draft(0, write(0, limit, False).token_ids)
        return limit, None
    if most_likely and look_every is not None and gatherer is None:
        return _look_back(write, sequence, controller, limit, look_every), None
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
        if gatherer is not None:
            token, distribution = gatherer.choose(scores)
        else:
            token, distribution = (outputs.choices, None) if most_likely else acceptance.choose(scores)
        if distribution is not None:
            probabilities.append(distribution)
        sequence.write_draft(num_drafted, token)
        num_drafted += 1
    return num_drafted, torch.stack(probabilities) if probabilities else None


def _proper(scores: Tensor) -> Tensor:
    """Return scores [vocabulary] that have a softmax: equal ones if the draft has overflowed or forbids every token.

    A token may be sampled from any distribution, as the target judges it by the one that it was sampled from.
    """
    return torch.where(torch.logsumexp(scores.float(), dim=-1).isfinite(), scores, torch.zeros_like(scores))


def _look_back(write: Write, sequence: TokenSequence, controller: Controller, limit: int, look_every: int) -> int:
    """Write `look_every` greedy drafts at a time and read their confidences together.

    Return the number of drafts up to the controller's stop. Drafts after it are not verified.
    """
    num_drafted = 0
    while num_drafted < limit:
        written = write(num_drafted, min(look_every, limit - num_drafted), True)
        sequence.write_draft(num_drafted, written.token_ids)
        assert written.confidence is not None, "asked for"
        numbers = iter(sequence.read(written.confidence.flatten()))
        for known in zip(numbers, numbers, strict=True):
            decision = controller.decide(num_drafted, DraftDistribution.of(*known))
            num_drafted += decision is not Decision.STOP
            if decision is not Decision.CONTINUE:
                return num_drafted
    return num_drafted
