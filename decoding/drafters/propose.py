"""The round of a drafter that runs a part of the model: one pass a token, until the controller or the limit says stop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.draft_length import Controller, Decision, DraftDistribution
from decoding.text import Shaping, TokenSequence

NextLogits = Callable[[int], Tensor]
"""Runs the draft on the text up to and with its `num_drafted`-th draft: logits [1, vocabulary] of the token behind it."""


Write = Callable[[int], Tensor]
"""Runs the draft as often as it is told: token ids [as many] behind the text, each the likeliest."""


def propose(
    step: NextLogits,
    write: Write,
    text: TokenSequence,
    controller: Controller,
    shaping: Shaping,
    acceptance: Acceptance,
    limit: int,
) -> tuple[int, Tensor | None]:
    """Write drafts behind the text, token by token; or all at once, where nothing has a say in what they are and how many.

    Returns how many, and the probabilities [num_drafted, vocabulary] they were sampled from (None if greedy or none drafted).
    A pass whose distribution the controller would not draw from was run all the same.
    """
    limit = min(limit, controller.limit())
    if limit > 0 and acceptance.is_greedy and not shaping.processors and not controller.looks_at_drafts:
        text.write_draft(0, write(limit))
        return limit, None
    probabilities: list[Tensor] = []
    num_drafted = 0
    decision = Decision.CONTINUE
    while num_drafted < limit and decision is Decision.CONTINUE:
        scores = shaping.one(text, num_drafted, step(num_drafted))
        decision = controller.decide(num_drafted, DraftDistribution(scores))
        if decision is Decision.STOP:
            break
        token, distribution = acceptance.choose(scores)
        if distribution is not None:
            probabilities.append(distribution)
        text.write_draft(num_drafted, token)
        num_drafted += 1
    return num_drafted, torch.stack(probabilities) if probabilities else None
