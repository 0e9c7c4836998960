"""Linear layers on few positions on a CPU, computed at nearly the bandwidth of memory (our formulation).

A pass over few positions is bound by reading the weights. Where measured (AMD Zen 4, one thread), the libraries that
torch calls read them at a third to a half of the bandwidth of a plain sum: MKL in float32, oneDNN in bfloat16. The kernel in
`linear.cpp` reads the weights in torch's own layout, so there is no second copy of them, at nearly full bandwidth for up to
eight positions (Intel Xeon; Zen 4 five, with AVX2 three), in bfloat16 with AMX for sixteen. A position's sums do not depend on
the number of positions, so the layers round alike in plain and in verifying passes.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from decoding.kernels.compiled import PRECISIONS, CompiledFunction, call_directly

MAX_POSITIONS = 65
"""Maximum number of positions outside compiled code; prompts are wider, and bound by arithmetic."""

MAX_WIDENED = 2**24
"""Maximum number of weights that are copied to float32 at once."""

MULTIPLY = CompiledFunction("linear.cpp", "sdtune_multiply", [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 4)
REFINE = CompiledFunction("linear.cpp", "sdtune_refine", [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 4)


@torch.library.custom_op("sdtune::few_positions", mutates_args=())
def few_positions(values: Tensor, weight: Tensor) -> Tensor:
    """Multiply `values` [.., inputs] by a contiguous `weight` [outputs, inputs] of the same precision."""
    values = values.contiguous()
    outputs = values.new_empty((*values.shape[:-1], weight.shape[0]))
    MULTIPLY(
        values.data_ptr(),
        weight.data_ptr(),
        outputs.data_ptr(),
        values.shape[:-1].numel(),
        *weight.shape,
        PRECISIONS.index(weight.dtype),
    )
    return outputs


@few_positions.register_fake
def _(values: Tensor, weight: Tensor) -> Tensor:
    return values.new_empty((*values.shape[:-1], weight.shape[0]))


@torch.library.custom_op("sdtune::refined", mutates_args=())
def refined(found: Tensor, values: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    """Return the outputs `found` [.., outputs] for `values` [.., inputs], the largest of each position computed by `few_positions`.

    An output is off by up to its bound [outputs] times the norm of the values: all that may be the largest are computed. If
    `bounds` are empty, these are the 16 largest.
    """
    found, values = found.contiguous(), values.contiguous()
    outputs = torch.empty_like(found)
    REFINE(
        found.data_ptr(),
        values.data_ptr(),
        weight.data_ptr(),
        bounds.data_ptr() if bounds.numel() else None,
        outputs.data_ptr(),
        values.shape[:-1].numel(),
        *weight.shape,
        PRECISIONS.index(weight.dtype),
    )
    return outputs


@refined.register_fake
def _(found: Tensor, values: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    return torch.empty_like(found)


class FewPositionsLinear(nn.Linear):
    """A linear layer that computes passes over few positions by the kernel.

    Weight and bias are shared with the original layer. Under autograd it computes like any linear layer.
    """

    widens: bool
    """True if many positions are multiplied in float32: torch takes up to ten times as long in a precision that the processor
    lacks."""

    @classmethod
    def of(cls, linear: nn.Linear, *, widens: bool = False) -> FewPositionsLinear:
        """Return `linear` computed by the kernel; see `decoding.kernels.choice`."""
        twin = cls.__new__(cls)
        twin.__dict__.update(linear.__dict__, widens=widens)
        return twin

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() or input.dtype != self.weight.dtype:
            return super().forward(input)
        if not torch.compiler.is_compiling() and input.shape[:-1].numel() > MAX_POSITIONS:
            return self._widened(input) if self.widens else super().forward(input)
        outputs = few_positions(input, self.weight)
        return outputs if self.bias is None else outputs + self.bias

    def _widened(self, input: Tensor) -> Tensor:
        values = input.float()
        rows = self.weight.split(max(1, MAX_WIDENED // self.in_features))
        outputs = torch.cat([linear(values, each.float()) for each in rows], dim=-1)
        return (outputs if self.bias is None else outputs + self.bias).to(input.dtype)


def register() -> None:
    call_directly(
        torch.ops.sdtune.few_positions.default,
        "aoti_torch_cpu_sdtune_few_positions",
        num_tensors=2,
        size=lambda values, weight: [*values.get_size()[:-1], weight.get_size()[0]],
    )
    call_directly(
        torch.ops.sdtune.refined.default,
        "aoti_torch_cpu_sdtune_refined",
        num_tensors=4,
        size=lambda found, *_: found.get_size(),
    )
