"""Tokens that a part writes one after another, each the likeliest, none of them known to the host before the last is there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decoding.acceptance import most_likely
from decoding.runners.contract import Outputs, Written

RunStep = Callable[[Tensor, int], Outputs]
"""Runs a part on a token [1, 1], the `index`-th behind the first: logits [1, vocabulary]."""


def write_by(step: RunStep, token_ids: Tensor, num_tokens: int) -> Written:
    """`num_tokens` tokens behind `token_ids` [1, 1], a step each."""
    written, states = [], []
    for index in range(num_tokens):
        outputs = step(token_ids, index)
        token_ids = most_likely(outputs.logits)[None]
        written.append(token_ids[0])
        if outputs.states is not None:
            states.append(outputs.states)
    return Written(torch.cat(written), torch.cat(states, dim=-2) if states else None)
