"""Greedy tokens that a part generates one after another, without waiting for the device in between."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decoding.acceptance import most_likely
from decoding.runners.contract import Outputs, Written

RunStep = Callable[[Tensor, int], Outputs]
"""Runs a part on a token [1, 1], the `index`-th after the first: logits [1, vocabulary]."""


def write_by(step: RunStep, token_ids: Tensor, num_tokens: int) -> Written:
    """Generate `num_tokens` greedy tokens after `token_ids` [1, 1], one step each."""
    written, states = [], []
    for index in range(num_tokens):
        outputs = step(token_ids, index)
        token_ids = most_likely(outputs.logits)[None]
        written.append(token_ids[0])
        if outputs.states is not None:
            states.append(outputs.states)
    return Written(torch.cat(written), torch.cat(states, dim=-2) if states else None)
