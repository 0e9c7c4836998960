"""Products with integer weights in plain torch: what the kernel computes, and what a weight has become."""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.kernels.quantised import MAX_VALUE, SMALLEST, int4_rows, int8_rows


def integers_of(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the integers of a weight [outputs, inputs] in float64, and the scale of each row [outputs]."""
    weight = weight.float()
    if bits == 8:
        scales, integers = int8_rows(weight)
        return integers.double(), scales
    scales, pairs, group_scales, minima = int4_rows(weight)
    four_bits = torch.cat([pairs & 15, pairs >> 4], dim=2).double()
    groups = four_bits * group_scales[..., None] + minima[..., None]
    return groups.flatten(1)[:, : weight.shape[1]], scales


def quantised_values(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers of `values` [.., inputs] in float64, and the scale of each position [.., 1] in float32."""
    values = values.float()
    largest = values.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    integers = (values * (MAX_VALUE / largest)).round()
    return integers.double(), torch.where(largest.isfinite(), largest / MAX_VALUE, torch.nan)


def products(values: Tensor, weight: Tensor, bits: int) -> Tensor:
    """Return the products [.., outputs] in the precision of `values` [.., inputs], from exact sums."""
    integers, of_rows = integers_of(weight, bits)
    given, of_positions = quantised_values(values)
    return ((given @ integers.t()) * of_rows.double() * of_positions.double()).float().to(values.dtype)
