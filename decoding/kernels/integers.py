"""Weights and values as integers, for quantised linear layers (our formulation).

* int8: one scale per row, symmetric.
* int4: two per byte, in groups of 32 inputs with a scale and a minimum. Both are integers in units of the row's scale,
  as in the k-quants of llama.cpp.
* Values: integers of 15 bits with one scale per position. Rounding them adds little to the error of the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from decoding.errors import UnsupportedModelError

MAX_VALUE = 127 * 128 + 63
"""Largest integer that stands for a value: 128 times a signed byte plus another one from -64 to 63."""

SMALLEST = 1e-30
"""Positions whose values are all smaller than this are rounded to it, so that no scale overflows."""

PIECE = 2**20
"""Weights that are rounded at a time: the temporary copies in float32 stay small beside a large layer."""

GROUP = 32
"""Inputs that share a scale and a minimum (int4)."""

MAX_SCALE = 63
"""Largest scale of a group, in units of the row's scale (int4). The sums of 17,000 inputs fit in 32 bits."""


class PackedWeight(nn.Module):
    """The integers of a weight [outputs, inputs] in any floating point precision, and the scale of each row.

    It is packed a few rows at a time. Raises `UnsupportedModelError` for a weight that is not finite.
    """

    bits: int
    scales: Tensor
    """[outputs] in float32: a weight is its integer times the scale of its row."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.num_outputs, self.num_inputs = weight.shape
        pieces = [self._packed(_finite(rows.float())) for rows in weight.split(max(1, PIECE // self.num_inputs))]
        for name in pieces[0]:
            self.register_buffer(name, torch.cat([piece[name] for piece in pieces]))

    def _packed(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the buffers of some rows [rows, inputs] in float32, by name."""
        raise NotImplementedError

    def integers(self, first: int, end: int) -> Tensor:
        """Return rows `first` to `end` (exclusive) in float64, [rows, inputs]."""
        raise NotImplementedError


class Int8Weight(PackedWeight):
    """Signed bytes from -127 to 127 with one scale per row."""

    bits = 8
    rows: Tensor
    """[outputs, inputs] in int8."""

    def _packed(self, rows: Tensor) -> dict[str, Tensor]:
        scales = rows.abs().amax(1).clamp(min=SMALLEST) / 127
        return {"scales": scales, "rows": (rows / scales[:, None]).round().clamp(-127, 127).to(torch.int8)}

    def integers(self, first: int, end: int) -> Tensor:
        """Return the bytes of these rows."""
        return self.rows[first:end].double()


class Int4Weight(PackedWeight):
    """Four bits per weight in groups of 32: `integer = group_scale * bits + minimum`. The range includes 0."""

    bits = 4
    pairs: Tensor
    """[outputs, groups, 16] in uint8: input i of a group in the lower half, input i + 16 in the upper half."""
    group_scales: Tensor
    """[outputs, groups] in uint8, from 0 to `MAX_SCALE`."""
    minima: Tensor
    """[outputs, groups] in int16, from -15 * `MAX_SCALE` to 0."""

    def _packed(self, rows: Tensor) -> dict[str, Tensor]:
        groups = pad(rows, (0, -self.num_inputs % GROUP)).unflatten(1, (-1, GROUP))
        minima, steps = groups.amin(2).clamp(max=0), (groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)) / 15
        scales = steps.amax(1, keepdim=True).clamp(min=SMALLEST) / MAX_SCALE
        group_scales = (steps / scales).round().clamp(0, MAX_SCALE)
        group_scales[(group_scales == 0) & (steps > 0)] = 1
        minima = (minima / scales).round()
        bits = (groups / scales[..., None] - minima[..., None]) / group_scales.clamp(min=1)[..., None]
        bits = bits.round().clamp(0, 15).to(torch.uint8)
        return {
            "scales": scales.squeeze(1),
            "pairs": bits[..., : GROUP // 2] | bits[..., GROUP // 2 :] << 4,
            "group_scales": group_scales.to(torch.uint8),
            "minima": minima.to(torch.int16),
        }

    def integers(self, first: int, end: int) -> Tensor:
        """Return the unpacked integers of these rows."""
        pairs, scales, minima = self.pairs[first:end], self.group_scales[first:end], self.minima[first:end]
        bits = torch.cat([pairs & 15, pairs >> 4], dim=2).double()
        return (bits * scales[..., None] + minima[..., None]).flatten(1)[:, : self.num_inputs]


def _finite(rows: Tensor) -> Tensor:
    if not rows.isfinite().all():
        raise UnsupportedModelError("a linear layer has weights that are not finite: it cannot be quantised")
    return rows


PACKED: dict[int, Callable[[Tensor], PackedWeight]] = {8: Int8Weight, 4: Int4Weight}
"""The packed weight of each number of bits, made from a weight [outputs, inputs]."""


def quantised_values(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers of `values` [.., inputs] in float64, and the scale of each position [.., 1] in float32."""
    values = values.float()
    largest = values.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    integers = (values * (MAX_VALUE / largest)).round()
    scales = torch.where(largest.isfinite(), largest / MAX_VALUE, torch.nan)
    return integers.double(), scales
