"""Linear layers with integer weights, for drafts and for the choice of the most likely token (our formulation).

* int8: one scale per row, symmetric.
* int4: two per byte, in groups of 32 inputs with a scale and a minimum. Both are integers in units of the row's scale,
  as in the k-quants of llama.cpp.
* Values: integers of 15 bits with one scale per position. Rounding them adds little to the error of the weights.

All products are products of integers, and their sums are exact: the bits of a position do not depend on the number of
positions or on the order of the sums. The kernel in `quantised.cpp` computes them at nearly the bandwidth of memory. Weights are
stored in tiles of 16 rows. Within a tile, four inputs of each row follow one another (int8, with 128 added to each
weight), or the bits of eight inputs of each row (int4: four in the lower halves of the bytes, and the four that come 16
inputs later in the upper halves).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from decoding.errors import UnsupportedModelError
from decoding.kernels.compiled import PRECISIONS, CompiledFunction, call_directly
from decoding.kernels.linear import few_positions, refined

MAX_VALUE = 127 * 128 + 63
"""Largest integer that stands for a value: 128 times a signed byte plus another one from -64 to 63."""

SMALLEST = 1e-30
"""Positions whose values are all smaller than this are rounded to it, so that no scale overflows."""

ROUNDED = 2**20
"""Weights whose errors are found at a time: the temporary copies stay small beside a large layer."""

GROUP = 32
"""Inputs that share a scale and a minimum (int4)."""

MAX_SCALE = 63
"""Largest scale of a group, in units of the row's scale (int4). The sums of 17,000 inputs fit in 32 bits."""

ROWS = 16
"""Rows of a tile."""

PIECE = 2**17
"""Weights that are packed at a time. The copies on the way are small, and use the same memory for each piece. Larger ones left
holes between the tiles that are kept: packing SmolLM2-135M took three times the memory of its tiles."""

ROW_AXES = {8: {"tiles": 2}, 4: {"tiles": 3, "group_scales": 2, "minima": 2}}
"""For each number of bits, the buffers in tiles, and which of their dimensions is the row of a tile."""

MAX_INPUTS = {8: 2**16, 4: 2**14}
"""Number of inputs whose sums are certain to fit in 32 bits, by bits of the weights."""

MAX_BFLOAT16_POSITIONS = 8
"""Positions up to which finding the largest outputs first pays in bfloat16. More hardly cost more where AMX multiplies."""

NOTHING = torch.empty(0, dtype=torch.uint8)
"""Group scales and minima of int8. The same tensor for all layers is one input of a compiled block, in place of two for each."""

MULTIPLY = CompiledFunction("quantised.cpp", "sdtune_quantised", [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 4)


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales [outputs] and integers from -127 to 127 [outputs, inputs] of a weight in float32: a symmetric int8."""
    scales = weight.abs().amax(1).clamp(min=SMALLEST) / 127
    return scales, (weight / scales[:, None]).round().clamp(-127, 127).to(torch.int8)


def int4_rows(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scales [outputs], bits in pairs, group scales and minima of a weight [outputs, inputs] in float32.

    `integer = group_scale * bits + minimum`, in groups of 32 inputs; the range includes 0. Pairs are [outputs, groups, 16], uint8:
    input i of a group in the lower half, input i + 16 in the upper half. Group scales [outputs, groups] are in uint8, from 0 to
    `MAX_SCALE`, minima in int16, from -15 * `MAX_SCALE` to 0.
    """
    groups = pad(weight, (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    least = groups.amin(2).clamp(max=0)
    steps = (groups.amax(2).clamp(min=0) - least) / 15
    scales = steps.amax(1, keepdim=True).clamp(min=SMALLEST) / MAX_SCALE
    group_scales = (steps / scales).round().clamp(0, MAX_SCALE)
    group_scales[(group_scales == 0) & (steps > 0)] = 1
    minima = (least / scales).round()
    bits = (groups / scales[..., None] - minima[..., None]) / group_scales.clamp(min=1)[..., None]
    bits = bits.round().clamp(0, 15).to(torch.uint8)
    pairs = bits[..., : GROUP // 2] | bits[..., GROUP // 2 :] << 4
    return scales.squeeze(1), pairs, group_scales.to(torch.uint8), minima.to(torch.int16)


def _int8_tiles(weight: Tensor) -> dict[str, Tensor]:
    scales, integers = int8_rows(weight)
    rows = pad(integers.view(torch.uint8) ^ 128, (0, -weight.shape[1] % 4, 0, -len(weight) % ROWS))
    tiles = rows.unflatten(1, (-1, 4)).unflatten(0, (-1, ROWS)).transpose(1, 2).contiguous()
    return {"scales": scales, "tiles": tiles, "group_scales": NOTHING, "minima": NOTHING}


def _int4_tiles(weight: Tensor) -> dict[str, Tensor]:
    scales, *parts = int4_rows(weight)
    odd = parts[0].shape[1] % 2
    pairs, group_scales, minima = (
        pad(each, (*[0] * (2 * each.ndim - 4), 0, odd, 0, -len(weight) % ROWS)).unflatten(0, (-1, ROWS))
        for each in parts
    )
    return {
        "scales": scales,
        "tiles": pairs.unflatten(3, (GROUP // 8, 4)).permute(0, 2, 3, 1, 4).contiguous(),
        "group_scales": group_scales.transpose(1, 2).contiguous(),
        "minima": minima.unflatten(2, (-1, 2)).transpose(1, 2).contiguous(),
    }


PACKED: dict[int, Callable[[Tensor], dict[str, Tensor]]] = {8: _int8_tiles, 4: _int4_tiles}
"""For each number of bits, what returns the buffers of a weight [outputs, inputs] in float32, by name, as the kernel reads them."""


def _packed(weight: Tensor, bits: int) -> dict[str, Tensor]:
    if not weight.isfinite().all():
        raise UnsupportedModelError("a linear layer has weights that are not finite: it cannot be quantised")
    return PACKED[bits](weight.float())


@torch.library.custom_op("sdtune::quantised", mutates_args=())
def multiply_integers(values: Tensor, tiles: Tensor, scales: Tensor, group_scales: Tensor, minima: Tensor) -> Tensor:
    """Multiply `values` [.., inputs] by a weight in tiles with the scales of its rows [outputs].

    `group_scales` and `minima` are empty for int8.
    """
    values = values.contiguous()
    outputs = values.new_empty((*values.shape[:-1], scales.shape[0]))
    MULTIPLY(
        values.data_ptr(),
        tiles.data_ptr(),
        scales.data_ptr(),
        group_scales.data_ptr() if group_scales.numel() else None,
        minima.data_ptr() if minima.numel() else None,
        outputs.data_ptr(),
        values.shape[:-1].numel(),
        scales.shape[0],
        values.shape[-1],
        PRECISIONS.index(values.dtype),
    )
    return outputs


@multiply_integers.register_fake
def _(values: Tensor, tiles: Tensor, scales: Tensor, group_scales: Tensor, minima: Tensor) -> Tensor:
    return values.new_empty((*values.shape[:-1], scales.shape[0]))


class TiledLinear(nn.Module):
    """A quantised linear layer, from a weight [outputs, inputs] in any floating point precision; its rows can be replaced in place.

    Inference only; outputs have the precision of the inputs. The weight is packed a few rows at a time. Raises
    `UnsupportedModelError` if it is not finite.
    """

    tiles: Tensor
    scales: Tensor
    """[outputs] in float32: a weight is its integer times the scale of its row."""
    group_scales: Tensor
    minima: Tensor
    bias: Tensor | None
    """The bias of the original layer, shared with it."""

    def __init__(self, weight: Tensor, bits: int, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bits = bits
        num_tiles, tiles_of_piece = -(-self.out_features // ROWS), max(1, PIECE // (ROWS * self.in_features))
        for piece, rows in enumerate(weight.split(tiles_of_piece * ROWS)):
            for name, part in _packed(rows, bits).items():
                is_by_tile = name != "scales"
                if not piece:
                    length = num_tiles if is_by_tile else self.out_features
                    whole = part if part is NOTHING else part.new_empty(length, *part.shape[1:])
                    self.register_buffer(name, whole)
                first = piece * tiles_of_piece * (1 if is_by_tile else ROWS)
                self.get_buffer(name)[first : first + len(part)] = part
        self.bias = bias

    def replace_rows(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Quantise `weight` [n, inputs] into the given `rows` [n], and give them these entries of the bias [n], if there is one."""
        packed = _packed(weight, self.bits)
        self.scales[rows] = packed["scales"]
        for name, axis in ROW_AXES[self.bits].items():
            by_row = packed[name].movedim(axis, 1).flatten(0, 1)[: len(rows)]
            self.get_buffer(name).movedim(axis, 1)[rows // ROWS, rows % ROWS] = by_row
        if self.bias is not None and bias is not None:
            self.bias[rows] = bias

    def forward(self, input: Tensor) -> Tensor:
        outputs = multiply_integers(input, self.tiles, self.scales, self.group_scales, self.minima)
        return outputs if self.bias is None else outputs + self.bias.to(input.dtype)


class RefinedLinear(nn.Module):
    """A linear layer whose largest outputs are those of `FewPositionsLinear` with its contiguous `weight` [outputs, inputs].

    `found_by` is the same layer with integer weights, without a bias, whose outputs the others are. It says which are the largest:
    SVD-softmax (NeurIPS 2017), with fewer bits in place of fewer dimensions. They are 16, or with `bounds` [outputs] all that may
    be the largest (see `error_bounds`). The weight is shared. Inference only, with inputs of its precision.
    """

    bounds: Tensor

    def __init__(self, weight: Tensor, found_by: TiledLinear, bounds: Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.found_by = weight, found_by
        self.register_buffer("bounds", torch.empty(0) if bounds is None else bounds)

    def forward(self, input: Tensor) -> Tensor:
        by, has_bounds = self.found_by, self.bounds.numel() > 0
        if has_bounds and input.dtype is torch.bfloat16 and input.shape[:-1].numel() > MAX_BFLOAT16_POSITIONS:
            return few_positions(input, self.weight.detach())
        found = multiply_integers(input, by.tiles, by.scales, by.group_scales, by.minima)
        return refined(found, input, self.weight.detach(), self.bounds)


def error_bounds(weight: Tensor) -> Tensor:
    """Return [outputs] in float32: how far int8 outputs of `weight` [outputs, inputs] may be off, per unit of the input's norm.

    By Cauchy-Schwarz, a row's outputs differ by at most the norm of its rounding errors times that of the input (our formulation).
    Rounding the input, and adding up in float32, is in it.
    """
    inputs = weight.shape[1]
    of_sums, of_values = inputs * 2.0**-23, 1.01 * math.sqrt(inputs) / (2 * MAX_VALUE)
    bounds = []
    for rows in weight.split(max(1, ROUNDED // inputs)):
        scales, integers = int8_rows(rows.float())
        own = integers.double() * scales.double()[:, None]
        error, norm = (rows.double() - own).norm(dim=1), rows.double().norm(dim=1)
        bounds.append(error + (of_sums + of_values) * (norm + error))
    return 1.001 * torch.cat(bounds).float()


def register() -> None:
    call_directly(
        torch.ops.sdtune.quantised.default,
        "aoti_torch_cpu_sdtune_quantised",
        num_tensors=5,
        size=lambda values, tiles, scales, *_: [*values.get_size()[:-1], scales.get_size()[0]],
    )
