"""The used part of each sequence's slots, in the form that variable-length attention takes.

One tensor [1, 1, 3, batch + 1] of int32 travels in place of a mask: where each sequence's queries begin, where its slots
begin, and how many of them it uses (the last number is padding). Queries are aligned with the end of the used slots, so
that each attends to all slots up to its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def used_lengths(used: Tensor, width: int, num_slots: int) -> Tensor:
    """Return the lengths of a pass of `width` positions per sequence over `num_slots` slots each, of which `used` [batch]."""
    steps = torch.arange(used.shape[0] + 1, device=used.device)
    return torch.stack([steps * width, steps * num_slots, pad(used, (0, 1))]).to(torch.int32)[None, None]


def of_last_position(lengths: Tensor, width: int, last_slot: Tensor) -> Tensor:
    """Return the lengths of the same pass narrowed to one of its `width` positions per sequence, at `last_slot` [batch]."""
    query_ends, key_ends, _ = lengths[0, 0]
    used = pad(last_slot + 1, (0, 1)).to(torch.int32)
    return torch.stack([query_ends // width, key_ends, used])[None, None]
