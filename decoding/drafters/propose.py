"""The draft loop of drafters that run a part of the model: one pass per token, until the controller or the limit stops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.draft_length import Controller, Decision, DraftDistribution
from decoding.text import Shaping, TokenSequence

NextLogits = Callable[[int], Tensor]
"""Runs the draft on the sequence and its first `num_drafted` drafts; returns the next logits [1, vocabulary]."""


Write = Callable[[int], Tensor]
"""Runs the draft `num_tokens` times; returns the most likely token ids [num_tokens] after the sequence."""


def propose(
    step: NextLogits,
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
    if limit > 0 and acceptance.is_greedy and not shaping.processors and not controller.looks_at_drafts:
        sequence.write_draft(0, write(limit))
        return limit, None
    probabilities: list[Tensor] = []
    num_drafted = 0
    decision = Decision.CONTINUE
    while num_drafted < limit and decision is Decision.CONTINUE:
        scores = shaping.one(sequence, num_drafted, step(num_drafted))
        decision = controller.decide(num_drafted, DraftDistribution(scores))
        if decision is Decision.STOP:
            break
        token, distribution = acceptance.choose(scores)
        if distribution is not None:
            probabilities.append(distribution)
        sequence.write_draft(num_drafted, token)
        num_drafted += 1
    return num_drafted, torch.stack(probabilities) if probabilities else None
