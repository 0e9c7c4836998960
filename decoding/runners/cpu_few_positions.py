"""Linear layers on few positions on a CPU, computed at nearly the bandwidth of memory (our formulation).

A pass over few positions is bound by reading the weights. Where measured (AMD Zen 4, one thread), the libraries that
torch calls read them at a third to a half of the bandwidth of a plain sum: MKL in float32, oneDNN in bfloat16, and
oneDNN with packed weights. The kernel in `cpu_few_positions.cpp` reads the weights in torch's own layout, so there is
no second copy of them, at nearly full bandwidth for one and two positions and at half of it for eight.

A position's sums do not depend on the number of positions, so the layers round alike in plain and in verifying passes.
The kernel needs AVX-512, and AVX-512 BF16 for bfloat16. Elsewhere `cpu_one_position` and `cpu_packed` take over.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decoding.errors import one_line

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
    return _is_supported(module.weight.dtype) and _library() is not None


def _is_supported(dtype: torch.dtype) -> bool:
    """Return True if this processor has the instructions for `dtype`."""
    if dtype is torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported()
    return dtype is torch.float32 and torch.cpu._is_avx512_supported()


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled kernel, or None with a warning if it cannot be compiled. torch keeps it on disk."""
    errors = importlib.import_module("torch._inductor.exc")
    cache = importlib.import_module("torch._inductor.codecache").CppCodeCache
    try:
        compiled = cache.load(SOURCE.read_text(), "cpu")
    except (errors.CppCompileError, errors.InvalidCxxCompiler) as cause:
        warnings.warn(f"linear layers run slower than they could: {one_line(cause)[:200]}", stacklevel=2)
        return None
    # Once more, with its names visible to the code that inductor compiles.
    library = ctypes.CDLL(compiled._name, mode=ctypes.RTLD_GLOBAL)
    library.sdtune_multiply.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 4
    library.sdtune_multiply.restype = None
    return library


def compile_few_positions() -> None:
    """Make inductor call the kernel directly, without going through Python."""
    lowering = importlib.import_module("torch._inductor.lowering")
    operator = torch.ops.sdtune.few_positions.default
    if operator not in lowering.lowerings:
        lowering.register_lowering(operator, type_promotion_kind=None)(_lowered)


def _lowered(values: Any, weight: Any) -> Any:
    """Build the call in inductor's IR."""
    ir, kernel = importlib.import_module("torch._inductor.ir"), _call_class()
    inputs = [kernel.require_contiguous(kernel.realize_input(each)) for each in (values, weight)]
    size = [*values.get_size()[:-1], weight.get_size()[0]]
    layout = ir.FixedLayout(device=values.get_device(), dtype=values.get_dtype(), size=size)
    return ir.TensorBox.create(kernel(layout, inputs, **CALL))


CALL: dict[str, Any] = {
    "op_overload": torch.ops.sdtune.few_positions.default,
    "cpp_kernel_name": "aoti_torch_cpu_sdtune_few_positions",
}
_ARGUMENTS = "AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*"
DECLARATION = f'extern "C" AOTITorchError {CALL["cpp_kernel_name"]}({_ARGUMENTS});'


@functools.cache
def _call_class() -> Any:
    """Return the class of the calls in inductor's IR, which takes a while to import."""
    base: Any = importlib.import_module("torch._inductor.ir").ExternKernelAlloc

    class FewPositionsCall(base):
        """A call of the kernel."""

        def codegen(self, wrapper: Any) -> None:
            """Write the declaration and the call."""
            wrapper.header.writeline(DECLARATION)
            super().codegen(wrapper)

        def apply_constraint(self) -> None:
            """Do nothing: the inputs are contiguous."""

    return FewPositionsCall
