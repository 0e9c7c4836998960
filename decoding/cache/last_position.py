"""Selection of a pass's last real position, which differs per sequence when padding follows it."""

from __future__ import annotations

from torch import Tensor


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
