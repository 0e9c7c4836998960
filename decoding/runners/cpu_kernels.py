"""Kernels of our own for a CPU: compiled at their first use, and called directly by the code that inductor compiles."""

from __future__ import annotations

import ctypes
import importlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from decoding.errors import one_line


def has_instructions(dtype: torch.dtype) -> bool:
    """Return True if this processor has the instructions by which kernels compute in `dtype`."""
    if dtype is torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported()
    return dtype is torch.float32 and torch.cpu._is_avx512_supported()


def compiled_library(source: Path) -> ctypes.CDLL | None:
    """Return the compiled `source`, or None with a warning if it cannot be compiled. torch keeps it on disk."""
    errors = importlib.import_module("torch._inductor.exc")
    cache = importlib.import_module("torch._inductor.codecache").CppCodeCache
    try:
        compiled = cache.load(source.read_text(), "cpu")
    except (errors.CppCompileError, errors.InvalidCxxCompiler) as cause:
        warnings.warn(f"passes run slower than they could: {one_line(cause)[:200]}", stacklevel=2)
        return None
    # Once more, with its names visible to the code that inductor compiles.
    return ctypes.CDLL(compiled._name, mode=ctypes.RTLD_GLOBAL)


def call_directly(operator: Any, name: str, num_inputs: int, num_outputs: Callable[[Sequence[Any]], Any]) -> None:
    """Make inductor call the C function `name` for `operator`, without going through Python.

    The function takes `num_inputs` contiguous tensors and allocates its output, which has the shape and precision of
    the first but for the last dimension: `num_outputs` of the inputs in inductor's IR.
    """
    lowering = importlib.import_module("torch._inductor.lowering")
    if operator in lowering.lowerings:
        return
    ir = importlib.import_module("torch._inductor.ir")
    kernel = call_class(name, ["AtenTensorHandle"] * num_inputs)

    def lowered(*tensors: Any) -> Any:
        inputs = [kernel.require_contiguous(kernel.realize_input(each)) for each in tensors]
        size = [*tensors[0].get_size()[:-1], num_outputs(tensors)]
        layout = ir.FixedLayout(device=tensors[0].get_device(), dtype=tensors[0].get_dtype(), size=size)
        return ir.TensorBox.create(kernel(layout, inputs, op_overload=operator, cpp_kernel_name=name))

    lowering.register_lowering(operator, type_promotion_kind=None)(lowered)


def call_class(name: str, arguments: Sequence[str]) -> Any:
    """Return the class of the calls of `name` in inductor's IR; `arguments` are the C types before the output's."""
    base: Any = importlib.import_module("torch._inductor.ir").ExternKernelAlloc
    declaration = f'extern "C" AOTITorchError {name}({", ".join([*arguments, "AtenTensorHandle*"])});'

    class KernelCall(base):
        """A call of the kernel."""

        def codegen(self, wrapper: Any) -> None:
            """Write the declaration and the call."""
            wrapper.header.writeline(declaration)
            super().codegen(wrapper)

        def apply_constraint(self) -> None:
            """Do nothing: the inputs are contiguous."""

    return KernelCall
