"""Inductor's compiled code, below what surrounds it: as a function of its tensors, and as a C++ function."""

from __future__ import annotations

import ctypes
import functools
import importlib
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

ENTRY = "_Z19inductor_entry_implPP16AtenTensorOpaqueS1_"
"""The C++ function of compiled code, `inductor_entry_impl(AtenTensorHandle*, AtenTensorHandle*)`, by its mangled name."""

WRAPPER_NAMES = {
    *("torch", "_C", "_aoti", "unsafe_alloc_void_ptrs_from_tensors", "alloc_tensors_by_stealing_from_void_ptrs"),
    *("isinstance", "Tensor", "tensor", "clear"),
}
"""What inductor's Python wrapper of that function uses if it does no more than pass its inputs on and return all outputs."""


@dataclass(frozen=True)
class KernelCall:
    """One call of compiled code."""

    compute: Callable[[list[Any]], Any]
    inputs: tuple[Any, ...]
    outputs: Sequence[Any]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The inputs that are tensors."""
        return tuple(each for each in self.inputs if isinstance(each, Tensor))

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """The inputs that are numbers: sizes that vary between passes. None for a tensor."""
        return tuple(None if isinstance(each, Tensor) else each for each in self.inputs)

    def returned(self, outputs: Sequence[Any]) -> bool:
        """Return True if `outputs` are those of the kernel: the same objects."""
        return len(outputs) == len(self.outputs) and all(map(operator.is_, outputs, self.outputs))


class CompiledKernel:
    """Compiled code as a function of its tensors. The numbers among its inputs are constants."""

    __name__ = "kernel"  # in the source of a tape

    def __init__(self, call: KernelCall) -> None:
        self._compute, self._numbers = call.compute, call.numbers
        self.num_outputs = len(call.outputs)
        self.entry = _entry(call.compute) if all(isinstance(each, Tensor) for each in call.outputs) else None
        """Address of the C++ function, which steals its inputs; None if only Python can make the call."""

    def __call__(self, *tensors: Tensor) -> Any:
        """Return the outputs."""
        rest = iter(tensors)
        return self._compute([next(rest) if number is None else number for number in self._numbers])

    @functools.cached_property
    def number_tensors(self) -> tuple[Tensor | None, ...]:
        """For each input its number as a tensor, as the C++ function takes it; None for the inputs that are tensors anyway."""
        return tuple(None if number is None else torch.tensor(number, device="cpu") for number in self._numbers)


def _entry(compute: Callable[..., Any]) -> int | None:
    """Return the address of the C++ function if `compute` is inductor's plain wrapper of one."""
    if not isinstance(compute, FunctionType) or len(compute.__closure__ or ()) != 1:
        return None
    if not WRAPPER_NAMES.issuperset(compute.__code__.co_names):
        return None  # it adds constants, or returns numbers
    assert compute.__closure__ is not None
    module = getattr(compute.__closure__[0].cell_contents, "__self__", None)
    library = getattr(module, "__file__", None)
    function = getattr(ctypes.CDLL(library), ENTRY, None) if library else None
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value


@contextmanager
def kernel_calls() -> Iterator[list[KernelCall]]:
    """Collect the calls of inductor's compiled code in this thread."""
    kind = importlib.import_module("torch._inductor.output_code").CompiledFxGraph
    original, made, listening = kind.__call__, list[KernelCall](), threading.get_ident()

    def call(graph: Any, inputs: Sequence[Any]) -> Any:
        kept = tuple(inputs)  # the kernel empties the list
        outputs = original(graph, inputs)
        if threading.get_ident() == listening:
            made.append(KernelCall(graph.current_callable, kept, outputs))
        return outputs

    kind.__call__ = call
    try:
        yield made
    finally:
        kind.__call__ = original
