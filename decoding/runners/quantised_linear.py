"""Linear layers with integer weights, for drafts (our formulation).

All products are products of integers, and their sums are exact: the bits of a position do not depend on the number of
positions, on the order of the sums, or on the implementation. `integers` describes the numbers.

A `QuantisedLinear` is plain torch. In compiled code, few positions are a sum of products that inductor can fuse with the
unpacking. Outside, weights are unpacked in pieces in every pass. On a CPU with AVX-512 VNNI, `cpu_quantised` computes the
same bits by a kernel. Other devices are refused: sums in float64 would be slower there than the layers that they replace.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from decoding.errors import UnsupportedModelError
from decoding.runners.cpu_quantised import TiledLinear, has_integer_kernel
from decoding.runners.integers import PACKED, PackedWeight, quantised_values

MAX_FUSED_POSITIONS = 8
"""Positions up to which compiled code sums products. More are a matrix product."""

MAX_UNPACKED = 2**24
"""Maximum number of weights that are unpacked at once outside compiled code."""


class QuantisedLinear(nn.Module):
    """A linear layer by a packed weight. Inference only; outputs have the precision of the inputs."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bits = weight.num_inputs, weight.num_outputs, weight.bits
        self.weight = weight
        self.bias = bias
        """The bias of the original layer, shared with it."""

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weight in bytes. The bias is shared with the original layer."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def forward(self, input: Tensor) -> Tensor:
        """Map [.., inputs] to [.., outputs]."""
        values, scales = quantised_values(input)
        outputs = (self._sums(values) * self.weight.scales.double() * scales.double()).float().to(input.dtype)
        return outputs if self.bias is None else outputs + self.bias.to(input.dtype)

    def _sums(self, values: Tensor) -> Tensor:
        """Return the exact sums [.., outputs] of products with integers [.., inputs], both in float64."""
        if torch.compiler.is_compiling() and values.shape[:-1].numel() <= MAX_FUSED_POSITIONS:
            return (values[..., None, :] * self.weight.integers(0, self.out_features)).sum(-1)
        pieces = [values @ self.weight.integers(*rows).t() for rows in self._pieces()]
        return torch.cat(pieces, dim=-1)

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Yield first and last (exclusive) rows of the pieces that are unpacked at once."""
        num_rows = max(1, MAX_UNPACKED // self.in_features)
        for first in range(0, self.out_features, num_rows):
            yield first, min(first + num_rows, self.out_features)


def check_device(device: torch.device) -> None:
    """Raise `UnsupportedModelError` unless quantised layers have an implementation on `device` that may pay."""
    if device.type != "cpu":
        raise UnsupportedModelError(
            f"drafts with int8 or int4 weights have no kernel on {device.type} yet, where they would be slower than the model "
            "itself: run them on a CPU, or tune a draft without `bits` on this device"
        )


def quantised(linear: nn.Linear, bits: int) -> nn.Module:
    """Return `linear` with weights of 8 or 4 bits; its bias is shared.

    Raises `ValueError` for another number of bits, and `UnsupportedModelError` if the layer is not a plain linear
    layer with finite weights on a CPU.
    """
    if bits not in PACKED:
        raise ValueError(f"weights of {bits} bits: choose from {', '.join(map(str, PACKED))}")
    if type(linear) is not nn.Linear or not linear.weight.is_floating_point() or linear.weight.is_meta:
        raise UnsupportedModelError(f"only plain linear layers can be quantised, not {type(linear).__name__}")
    check_device(linear.weight.device)
    with torch.inference_mode(False), torch.no_grad():
        weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        if has_integer_kernel(weight, bits):
            return TiledLinear(weight, bits, bias)
        return QuantisedLinear(PACKED[bits](weight), bias)


def is_fast_on(device: torch.device) -> bool:
    """Return True if quantised layers were measured to be faster than others on `device`: a CPU with AVX-512 VNNI."""
    return device.type == "cpu" and torch.cpu._is_avx512_supported() and torch.cpu._is_vnni_supported()
