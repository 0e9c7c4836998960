"""C++ sources beside this file: compiled at their first use, and called directly by the code that inductor compiles."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from decoding.errors import one_line

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
"""Precisions in which kernels read values and weights, in the order of `lanes.h`."""


class CompiledFunction:
    """A C function of a source file, which torch compiles once, beside the others, and keeps on disk."""

    def __init__(
        self, source: str, name: str, arguments: Sequence[Any], result: Any = None, *, keeps_lock: bool = False
    ) -> None:
        """`keeps_lock` calls it with Python's lock, for code that releases the lock itself."""
        self._source, self._name, self._arguments, self._result = source, name, arguments, result
        self._keeps_lock = keeps_lock

    @property
    def exists(self) -> bool:
        """True if the source can be compiled; else there is a warning."""
        return self._library is not None

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    @functools.cached_property
    def _library(self) -> ctypes.CDLL | None:
        errors = importlib.import_module("torch._inductor.exc")
        cache = importlib.import_module("torch._inductor.codecache").CppCodeCache
        sources = {path.name: _with_headers(_read(path.name)) for path in Path(__file__).parent.glob("*.cpp")}
        try:
            # All at once: a model needs most of them, and each takes seconds.
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                loads = {name: cache.load_async(source, "cpu", pool.submit) for name, source in sources.items()}
            compiled = loads[self._source]()
        except (errors.CppCompileError, errors.InvalidCxxCompiler) as cause:
            warnings.warn(f"passes run slower than they could: {one_line(cause)[:200]}", stacklevel=3)
            return None
        # Once more, with its names visible to the code that inductor compiles.
        return ctypes.CDLL(compiled._name, mode=ctypes.RTLD_GLOBAL)

    @functools.cached_property
    def _function(self) -> Any:
        assert self._library is not None, "checked by `decoding.kernels.choice`"
        library = ctypes.PyDLL(self._library._name) if self._keeps_lock else self._library
        function = getattr(library, self._name)
        function.argtypes, function.restype = list(self._arguments), self._result
        return function


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _with_headers(source: str) -> str:
    """Return a source with our headers in their places: torch compiles it in a folder of its own."""
    return re.sub(r'^#include "(.+)"$', lambda found: _read(found[1]), source, flags=re.MULTILINE)


def call_directly(
    operator: Any, name: str, num_tensors: int, size: Callable[..., Sequence[Any]], scalars: Sequence[str] = ()
) -> None:
    """Make inductor call the C function `name` for `operator`, without going through Python.

    The function takes `num_tensors` contiguous tensors and numbers of the C types `scalars`, and allocates its output. That has the
    precision of the first tensor, and the `size` of the tensors in inductor's IR.
    """
    lowering = importlib.import_module("torch._inductor.lowering")
    if operator in lowering.lowerings:
        return
    ir = importlib.import_module("torch._inductor.ir")
    kernel = _call_class(name, [*["AtenTensorHandle"] * num_tensors, *scalars])

    def lowered(*given: Any) -> Any:
        tensors, numbers = given[:num_tensors], given[num_tensors:]
        inputs = [kernel.require_contiguous(kernel.realize_input(each)) for each in tensors]
        layout = ir.FixedLayout(tensors[0].get_device(), tensors[0].get_dtype(), list(size(*tensors)))
        return ir.TensorBox.create(kernel(layout, inputs, numbers, op_overload=operator, cpp_kernel_name=name))

    lowering.register_lowering(operator, type_promotion_kind=None)(lowered)


def _call_class(name: str, arguments: Sequence[str]) -> Any:
    """Return the class of the calls of `name` in inductor's IR; `arguments` are the C types before the output's."""
    base: Any = importlib.import_module("torch._inductor.ir").ExternKernelAlloc
    declaration = f'extern "C" AOTITorchError {name}({", ".join([*arguments, "AtenTensorHandle*"])});'

    class KernelCall(base):
        """A call of the kernel."""

        def codegen(self, wrapper: Any) -> None:
            wrapper.header.writeline(declaration)
            super().codegen(wrapper)

        def apply_constraint(self) -> None:
            """Do nothing: the inputs are contiguous."""

    return KernelCall
