"""The draft loop of drafters that run a part of the model: one pass per token, until the controller or the limit stops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.draft_length import Controller, Decision, DraftDistribution
from decoding.runners.contract import Outputs
from decoding.text import Shaping, TokenSequence

Step = Callable[[int, bool], Outputs]
"""Runs the draft on the sequence and its first drafts, as many as the first argument says; logits are [1, vocabulary].

The second argument is `looks` of `Runner.run`.
"""

Write = Callable[[int], Tensor]
"""Runs the draft `num_tokens` times; returns the most likely token ids [num_tokens] after the sequence."""


def propose(
    step: Step,
    write: Write,
    sequence: TokenSequence,
    controller: Controller,
    shaping: Shaping,
    acceptance: Acceptance,
    limit: int,
) -> tuple[int, Tensor | None]:
    """Write drafts after the sequence, token by token; all at once if greedy and nothing looks at their distributions.

    Returns the number of drafts and the probabilities [num_drafted, vocabulary] they were sampled from (None if greedy or if
    nothing was drafted). The pass whose distribution the controller rejects has run too.
    """
    limit = min(limit, controller.limit())
    looks, most_likely = controller.looks_at_drafts, acceptance.is_greedy and not shaping.processors
    if limit > 0 and most_likely and not looks:
        sequence.write_draft(0, write(limit))
        return limit, None
    probabilities: list[Tensor] = []
    num_drafted = 0
    decision = Decision.CONTINUE
    while num_drafted < limit and decision is Decision.CONTINUE:
        outputs = step(num_drafted, looks)
        scores = outputs.logits[0] if most_likely else shaping.one(sequence, num_drafted, outputs.logits)
        known = None if shaping.processors else outputs.confidence
        decision = controller.decide(num_drafted, DraftDistribution(scores, sequence.read, known))
        if decision is Decision.STOP:
            break
        token, distribution = (outputs.choices, None) if most_likely else acceptance.choose(scores)
        if distribution is not None:
            probabilities.append(distribution)
        sequence.write_draft(num_drafted, token)
        num_drafted += 1
    return num_drafted, torch.stack(probabilities) if probabilities else None
