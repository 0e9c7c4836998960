"""Selection of a pass's last real position, which differs per sequence when padding follows it, and the used part of its slots.

The used part has the form that variable-length attention takes: one tensor [1, 1, 3, batch + 1] of int32 in place of a mask:
where each sequence's queries begin, where its slots begin, and how many of them it uses (the last number is padding). Queries are
aligned with the end of the used slots, so that each attends to all slots up to its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def last_position(values: Tensor, dim: int, last: Tensor | None) -> Tensor:
    """Return the last position [.., 1, ..] of `values`, whose positions run along `dim` (negative).

    `last` is its index: [1] for all sequences, [batch] per sequence, or None for the end. The batch dimension is the
    one before `dim`, or, if that has a single entry (the heads of a mask), the one before it.
    """
    if last is None:
        return values.narrow(dim, values.shape[dim] - 1, 1)
    if last.shape[0] == 1:
        return values.index_select(dim, last)
    return values.take_along_dim(_spread(last, values, dim), dim)


def with_last(values: Tensor, last_values: Tensor, dim: int, last: Tensor) -> Tensor:
    """Return `values` with `last_values` [.., 1, ..] at the last position; see `last_position`."""
    if last.shape[0] == 1:
        return values.index_copy(values.ndim + dim, last, last_values)
    return values.scatter(dim, _spread(last, values, dim).expand_as(last_values), last_values)


def _spread(last: Tensor, values: Tensor, dim: int) -> Tensor:
    """Reshape `last` [batch] to the dimensions of `values`: batch size in the batch dimension, else 1."""
    batch_dim = dim - 1 if values.shape[dim - 1] == last.shape[0] else dim - 2
    shape = [1] * values.ndim
    shape[batch_dim] = last.shape[0]
    return last.view(shape)


def used_lengths(used: Tensor, width: int, num_slots: int) -> Tensor:
    """Return the lengths of a pass of `width` positions per sequence over `num_slots` slots each, of which `used` [batch]."""
    steps = torch.arange(used.shape[0] + 1, device=used.device)
    return torch.stack([steps * width, steps * num_slots, pad(used, (0, 1))]).to(torch.int32)[None, None]


def of_last_position(lengths: Tensor, width: int, last_slot: Tensor) -> Tensor:
    """Return the lengths of the same pass narrowed to one of its `width` positions per sequence, at `last_slot` [batch]."""
    query_ends, key_ends, _ = lengths[0, 0]
    used = pad(last_slot + 1, (0, 1)).to(torch.int32)
    return torch.stack([query_ends // width, key_ends, used])[None, None]
