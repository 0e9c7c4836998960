"""Greedy tokens that a part generates one after another, without waiting for the device in between."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decoding.runners.contract import Outputs, Written, confidence

WritePiece = Callable[[Tensor, int], Written]
"""Lets a part write at least one token after a token [.., 1], the `index`-th after the first."""


def write_by(piece: WritePiece, token_ids: Tensor, num_tokens: int) -> Written:
    """Write `num_tokens` greedy tokens [.., num_tokens] after `token_ids` [.., 1], piece by piece."""
    pieces: list[Written] = []
    index = 0
    while index < num_tokens:
        pieces.append(piece(token_ids, index))
        token_ids = pieces[-1].token_ids[..., -1:].reshape(token_ids.shape)
        index += pieces[-1].token_ids.shape[-1]
    if len(pieces) == 1:
        return pieces[0]
    states = [each.states for each in pieces if each.states is not None]
    looked = [each.confidence for each in pieces if each.confidence is not None]
    written = torch.cat([each.token_ids for each in pieces], dim=-1)
    return Written(
        written, torch.cat(states, dim=-2) if states else None, torch.cat(looked, dim=-2) if looked else None
    )


def one_token(outputs: Outputs, *, looks: bool) -> Written:
    """Return the most likely token after a pass with logits of one position, and its confidence if `looks`."""
    if not looks:
        return Written(outputs.choices, outputs.states)
    judged = outputs.judged
    known = None if judged is None else judged.confidence
    return Written(outputs.choices, outputs.states, confidence(outputs.logits) if known is None else known)
