"""The last position of a pass, where padding may stand behind it, and in each of several texts another one."""

from __future__ import annotations

from torch import Tensor


def last_position(values: Tensor, dim: int, last: Tensor | None) -> Tensor:
    """Of `values` with a row a position along `dim` (negative), the last position's alone [.., 1, ..].

    `last` says which that is: [1] one place for all, [texts] one for each text, None the end. Texts lie in the dimension in front
    of `dim`, or, if that has a single entry (the heads of a mask), in the one before.
    """
    if last is None:
        return values.narrow(dim, values.shape[dim] - 1, 1)
    if last.shape[0] == 1:
        return values.index_select(dim, last)
    return values.take_along_dim(_spread(last, values, dim), dim)


def with_last(values: Tensor, last_values: Tensor, dim: int, last: Tensor) -> Tensor:
    """`values` with `last_values` [.., 1, ..] in the place of the last position; see `last_position`."""
    if last.shape[0] == 1:
        return values.index_copy(values.ndim + dim, last, last_values)
    return values.scatter(dim, _spread(last, values, dim).expand_as(last_values), last_values)


def _spread(last: Tensor, values: Tensor, dim: int) -> Tensor:
    """`last` [texts] with as many dimensions as `values`: one a text where its texts are, a single entry elsewhere."""
    texts = dim - 1 if values.shape[dim - 1] == last.shape[0] else dim - 2
    shape = [1] * values.ndim
    shape[texts] = last.shape[0]
    return last.view(shape)
