"""Linear layers on few positions on a CPU, computed at nearly the bandwidth of memory (our formulation).

A pass over few positions is bound by reading the weights. Where measured (AMD Zen 4, one thread), the libraries that
torch calls read them at a third to a half of the bandwidth of a plain sum: MKL in float32, oneDNN in bfloat16, and
oneDNN with packed weights. The kernel in `cpu_few_positions.cpp` reads the weights in torch's own layout, so there is
no second copy of them, at nearly full bandwidth for up to five positions and at 0.6 of it for eight.

A position's sums do not depend on the number of positions, so the layers round alike in plain and in verifying passes.
The kernel needs AVX-512, and AVX-512 BF16 for bfloat16. Elsewhere `cpu_one_position` and `cpu_packed` take over.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor, nn

from decoding.runners.cpu_kernels import call_directly, compiled_library, has_instructions

SOURCE = Path(__file__).with_suffix(".cpp")

MAX_POSITIONS = 65
"""Maximum number of positions outside compiled code; prompts are wider, and bound by arithmetic."""


@torch.library.custom_op("sdtune::few_positions", mutates_args=())
def few_positions(values: Tensor, weight: Tensor) -> Tensor:
    """Multiply `values` [.., inputs] by a contiguous `weight` [outputs, inputs] of the same precision."""
    library = _library()
    assert library is not None, "checked by `has_kernel` when the layer was made"
    values = values.contiguous()
    outputs = values.new_empty((*values.shape[:-1], weight.shape[0]))
    library.sdtune_multiply(
        values.data_ptr(),
        weight.data_ptr(),
        outputs.data_ptr(),
        values.shape[:-1].numel(),
        *weight.shape,
        weight.itemsize,
    )
    return outputs


@few_positions.register_fake
def _(values: Tensor, weight: Tensor) -> Tensor:
    return values.new_empty((*values.shape[:-1], weight.shape[0]))


class FewPositionsLinear(nn.Linear):
    """A linear layer that computes passes over few positions by the kernel.

    Weight and bias are shared with the original layer. Under autograd it computes like any linear layer.
    """

    @classmethod
    def of(cls, linear: nn.Linear) -> FewPositionsLinear:
        """Return `linear` computed by the kernel; it must satisfy `has_kernel`."""
        twin = cls.__new__(cls)
        twin.__dict__.update(linear.__dict__)
        return twin

    def forward(self, input: Tensor) -> Tensor:
        """Map [.., inputs] to [.., outputs]."""
        if torch.is_grad_enabled() or input.dtype != self.weight.dtype:
            return super().forward(input)
        if not torch.compiler.is_compiling() and input.shape[:-1].numel() > MAX_POSITIONS:
            return super().forward(input)
        outputs = few_positions(input, self.weight)
        return outputs if self.bias is None else outputs + self.bias


def has_kernel(module: nn.Module) -> bool:
    """Return True if the kernel computes this module: a plain `nn.Linear` on a CPU that has the instructions."""
    if type(module) is not nn.Linear or module.weight.device.type != "cpu" or not module.weight.is_contiguous():
        return False
    return has_instructions(module.weight.dtype) and _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled kernel, or None with a warning if it cannot be compiled."""
    library = compiled_library(SOURCE)
    if library is None:
        return None
    library.sdtune_multiply.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 4
    library.sdtune_multiply.restype = None
    return library


def compile_few_positions() -> None:
    """Make inductor call the kernel directly, without going through Python."""
    call_directly(
        torch.ops.sdtune.few_positions.default,
        "aoti_torch_cpu_sdtune_few_positions",
        num_inputs=2,
        num_outputs=lambda inputs: inputs[1].get_size()[0],
    )
