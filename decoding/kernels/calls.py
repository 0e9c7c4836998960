"""Compiled code on a CPU as C++ functions, and consecutive calls of it made from C++ (our formulation).

Each call of a compiled block from Python converts its inputs, weights among them, and its outputs. On SmolLM2-135M, this takes a
fifth of the time of an int8 draft step. Here the inputs that do not change are converted once, and results go from call to call.
"""

from __future__ import annotations

import array
import ctypes
import functools
import importlib
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx

from decoding.kernels.compiled import CompiledFunction

MESSAGE_BYTES = 500
"""Room for the message of an error."""

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
PLAY = CompiledFunction(
    "calls.cpp",
    "sdtune_play",
    [_POINTER, _NUMBER, _NUMBER, *[_POINTER, _NUMBER] * 3, _POINTER, ctypes.c_char_p, _NUMBER],
    _NUMBER,
    keeps_lock=True,
)
"""Makes the calls, with Python's lock: compiled blocks release it."""


@dataclass(frozen=True)
class Call:
    """A call of compiled code: the address of its C++ function, and the slots of its inputs and outputs.

    An output without a slot (None) is not used.
    """

    entry: int
    inputs: Sequence[int]
    outputs: Sequence[int | None]


class ConsecutiveCalls:
    """A function of some tensors that makes several calls, one after another.

    Slots are numbered: first `constants`, then the `num_given` tensors that it is called with, then the outputs of the calls. It
    returns the tensors in the slots `returned`, each of which is an output. It may be called by several threads at once.

    Raises RuntimeError if a call fails.
    """

    __name__ = "consecutive_calls"  # in the source of a tape

    def __init__(
        self, calls: Sequence[Call], constants: Sequence[Tensor], num_given: int, returned: Sequence[int]
    ) -> None:
        self._num_calls, self._num_given = len(calls), num_given
        self._program = array.array("q", _program(calls, len(constants), set(returned)))
        self._returned = array.array("q", returned)
        outputs = [slot for call in calls for slot in call.outputs if slot is not None]
        self._num_slots = max([len(constants) + num_given - 1, *outputs]) + 1
        held = _handles(list(constants))
        # The capsules own nothing: the tensors behind them are freed by being taken.
        weakref.finalize(self, _tensors, held).atexit = False
        self._constants = array.array("Q", map(_pointer, held))

    def __call__(self, *given: Tensor) -> list[Tensor]:
        """Return the tensors in the slots `returned`."""
        assert len(given) == self._num_given
        inputs = array.array("Q", map(_pointer, _handles(list(given))))
        results = (ctypes.c_void_p * len(self._returned))()
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        failed = PLAY(
            *(self._program.buffer_info()[0], self._num_calls, self._num_slots),
            *self._constants.buffer_info(),
            *inputs.buffer_info(),
            *self._returned.buffer_info(),
            *(results, message, MESSAGE_BYTES),
        )
        if failed:
            raise RuntimeError(f"a compiled block failed: {message.value.decode(errors='replace')}")
        return _tensors([_capsule(each, None, None) for each in results])


def _program(calls: Sequence[Call], num_constants: int, kept: set[int]) -> list[int]:
    """Return the numbers that `calls.cpp` reads. The last use of a slot that is neither a constant nor kept is marked."""
    last_use = {slot: (index, place) for index, call in enumerate(calls) for place, slot in enumerate(call.inputs)}
    numbers = []
    for index, call in enumerate(calls):
        numbers += [call.entry, len(call.inputs), len(call.outputs)]
        for place, slot in enumerate(call.inputs):
            is_last = last_use[slot] == (index, place) and slot >= num_constants and slot not in kept
            numbers.append(~slot if is_last else slot)
        numbers += [-1 if slot is None else slot for slot in call.outputs]
    return numbers


_handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
"""Returns capsules of new handles of tensors. The caller has to free them."""

_tensors = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
"""Returns the tensors of capsules, and frees their handles."""

_capsule: Any = ctypes.pythonapi.PyCapsule_New
_capsule.argtypes, _capsule.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object


def _pointer(capsule: object) -> int:
    address: int = _get_pointer(capsule, None)
    return address


_get_pointer: Any = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.argtypes, _get_pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p


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


def result(values: Sequence[Tensor], index: int) -> Tensor:
    """Return one of the results of a call: the node of a graph behind a call with several."""
    return values[index]


def call(function: ConsecutiveCalls, *given: Tensor) -> list[Tensor]:
    """Return the results of consecutive calls: the function of their node, whose first argument is an input of the graph."""
    return function(*given)


def join_calls(graph: fx.Graph, memory: MutableMapping[fx.Node, Any]) -> None:
    """Replace consecutive calls of compiled code in `graph` by one call each; `memory` are the tensors of its inputs.

    Each joined call is a new last input of the graph. It holds weights: as the target of a node it would keep them until a
    garbage collection, since a graph and its nodes refer to one another. Inputs of the graph may lose all their uses.
    """
    runs = list(_runs(graph))
    if runs and PLAY.exists:
        for run in runs:
            _join(graph, run, memory)


def _runs(graph: fx.Graph) -> Iterable[list[fx.Node]]:
    """Yield the calls of compiled code that follow one another, each with the nodes of its results."""
    run: list[fx.Node] = []
    for node in graph.nodes:
        if _is_kernel(node) or (node.target is result and node.args[0] in run):
            run.append(node)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _is_kernel(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, CompiledKernel) and node.target.entry is not None


def _join(graph: fx.Graph, run: Sequence[fx.Node], memory: MutableMapping[fx.Node, Any]) -> None:
    kernels = [node for node in run if isinstance(node.target, CompiledKernel)]
    results = {(node.args[0], node.args[1]): node for node in run if node.target is result}
    own = set(results.values())
    inputs = [_inputs(node) for node in kernels]
    nodes = dict.fromkeys(each for row in inputs for each in row if isinstance(each, fx.Node) and each not in own)
    numbers = [each for row in inputs for each in row if isinstance(each, Tensor)]
    held, given = [each for each in nodes if each in memory], [each for each in nodes if each not in memory]

    slots: dict[int, int] = {}  # of nodes and tensors, by their identity
    for each in [*held, *numbers, *given, *results.values()]:
        slots.setdefault(id(each), len(slots))
    calls = [
        Call(
            entry=node.target.entry,
            inputs=[slots[id(each)] for each in row],
            outputs=[
                slots[id(results[node, index])] if (node, index) in results else None
                for index in range(node.target.num_outputs)
            ],
        )
        for node, row in zip(kernels, inputs, strict=True)
        if isinstance(node.target, CompiledKernel) and node.target.entry is not None
    ]
    used = [node for node in results.values() if any(user not in run for user in node.users)]
    constants = [*(memory[each] for each in held), *{id(each): each for each in numbers}.values()]
    function = ConsecutiveCalls(calls, constants, len(given), [slots[id(node)] for node in used])
    with graph.inserting_after(list(memory)[-1]):
        holder = graph.placeholder(f"joined_{len(memory)}")
    memory[holder] = function
    with graph.inserting_after(run[-1]):
        joined = graph.call_function(call, (holder, *given))
    for index, node in reversed(list(enumerate(used))):
        with graph.inserting_after(joined):
            node.replace_all_uses_with(graph.call_function(result, (joined, index)))
    for node in reversed(run):
        graph.erase_node(node)


def _inputs(node: fx.Node) -> list[fx.Node | Tensor]:
    """Return the inputs of a call as the C++ function takes them: nodes, and numbers as tensors."""
    assert isinstance(node.target, CompiledKernel)
    tensors = (each for each in node.args if isinstance(each, fx.Node))
    return [next(tensors) if number is None else number for number in node.target.number_tensors]
