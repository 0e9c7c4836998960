"""Linear layers with integer weights on a CPU, computed at nearly the bandwidth of memory (our formulation).

The kernel in `cpu_quantised.cpp` needs AVX-512 VNNI. It computes the bits of `quantised_linear.QuantisedLinear`, for
any number of positions.

Weights are stored in tiles of 16 rows. Within a tile, four inputs of each row follow one another (int8, with 128 added
to each weight), or the bits of eight inputs of each row (int4: four in the lower halves of the bytes, and the four that
come 16 inputs later in the upper halves).
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from decoding.runners.cpu_kernels import call_directly, compiled_library
from decoding.runners.integers import GROUP, PACKED, Int4Weight, Int8Weight, PackedWeight

SOURCE = Path(__file__).with_suffix(".cpp")

ROWS = 16
"""Rows of a tile."""

PIECE = 2**17
"""Weights that are packed at a time. The copies on the way are small, and use the same memory for each piece. Larger ones left
holes between the tiles that are kept: packing SmolLM2-135M took three times the memory of its tiles."""

MAX_INPUTS = {8: 2**16, 4: 2**14}
"""Number of inputs whose sums are certain to fit in 32 bits, by bits of the weights."""

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
"""Precisions of values and outputs, in the order of the kernel."""


@torch.library.custom_op("sdtune::quantised", mutates_args=())
def multiply_integers(values: Tensor, tiles: Tensor, scales: Tensor, group_scales: Tensor, minima: Tensor) -> Tensor:
    """Multiply `values` [.., inputs] by a weight in tiles with the scales of its rows [outputs].

    `group_scales` and `minima` are empty for int8.
    """
    library = _library()
    assert library is not None, "checked by `has_integer_kernel` when the layer was made"
    values = values.contiguous()
    outputs = values.new_empty((*values.shape[:-1], scales.shape[0]))
    library.sdtune_quantised(
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
    """A linear layer by the kernel, from a weight [outputs, inputs] in any floating point precision.

    Inference only; outputs have the precision of the inputs. The weight is packed a few rows at a time. Raises
    `UnsupportedModelError` if it is not finite.
    """

    tiles: Tensor
    scales: Tensor
    group_scales: Tensor
    minima: Tensor

    def __init__(self, weight: Tensor, bits: int, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bits = bits
        num_tiles, tiles_of_piece = -(-self.out_features // ROWS), max(1, PIECE // (ROWS * self.in_features))
        for piece, rows in enumerate(weight.split(tiles_of_piece * ROWS)):
            packed = PACKED[bits](rows)
            parts = dict(zip(("tiles", "group_scales", "minima"), _tiles(packed), strict=True), scales=packed.scales)
            for name, part in parts.items():
                is_by_tile = name != "scales"
                if not piece:
                    length = num_tiles if is_by_tile else self.out_features
                    self.register_buffer(name, part.new_empty(length * bool(len(part)), *part.shape[1:]))
                first = piece * tiles_of_piece * (1 if is_by_tile else ROWS)
                self.get_buffer(name)[first : first + len(part)] = part
        self.bias = bias
        """The bias of the original layer, shared with it."""

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weight in bytes. The bias is shared with the original layer."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def forward(self, input: Tensor) -> Tensor:
        """Map [.., inputs] to [.., outputs]."""
        outputs = multiply_integers(input, self.tiles, self.scales, self.group_scales, self.minima)
        return outputs if self.bias is None else outputs + self.bias.to(input.dtype)


def has_integer_kernel(weight: Tensor, bits: int) -> bool:
    """Return True if the kernel computes products with `weight` [outputs, inputs]: it is on a CPU that has the instructions."""
    if weight.device.type != "cpu" or weight.shape[1] > MAX_INPUTS[bits]:
        return False
    return torch.cpu._is_avx512_supported() and torch.cpu._is_vnni_supported() and _library() is not None


def _tiles(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tiles of a weight, its group scales and its minima as the kernel reads them."""
    empty = torch.empty(0, dtype=torch.uint8)
    if isinstance(weight, Int8Weight):
        rows = pad(weight.rows.view(torch.uint8) ^ 128, (0, -weight.num_inputs % 4, 0, -weight.num_outputs % ROWS))
        return rows.unflatten(1, (-1, 4)).unflatten(0, (-1, ROWS)).transpose(1, 2).contiguous(), empty, empty
    assert isinstance(weight, Int4Weight)
    groups = -weight.pairs.shape[1] % 2
    pairs, scales, minima = (
        pad(each, (*[0] * (2 * each.ndim - 4), 0, groups, 0, -weight.num_outputs % ROWS)).unflatten(0, (-1, ROWS))
        for each in (weight.pairs, weight.group_scales, weight.minima)
    )
    tiles = pairs.unflatten(3, (GROUP // 8, 4)).permute(0, 2, 3, 1, 4)
    in_pairs = minima.unflatten(2, (-1, 2)).transpose(1, 2)
    return tiles.contiguous(), scales.transpose(1, 2).contiguous(), in_pairs.contiguous()


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled kernel, or None with a warning if it cannot be compiled."""
    library = compiled_library(SOURCE)
    if library is None:
        return None
    library.sdtune_quantised.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 4
    library.sdtune_quantised.restype = None
    return library


def compile_integer_kernel() -> None:
    """Make inductor call the kernel directly, without going through Python."""
    call_directly(
        torch.ops.sdtune.quantised.default,
        "aoti_torch_cpu_sdtune_quantised",
        num_inputs=5,
        num_outputs=lambda inputs: inputs[2].get_size()[0],
    )
