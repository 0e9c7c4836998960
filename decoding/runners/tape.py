"""Tapes: a pass on a CPU is recorded call by call and replayed without the Python around it (our formulation).

A CPU has no CUDA graphs, but the same need. A pass of a small model spends a good part of its time on the way through
modules, guards and wrappers. A tape holds the operators that a pass ran, compiled blocks among them, as one straight
function (`torch.fx`). It runs the same operators on the same memory, so its results are the same, bit by bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Generic, cast

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from decoding.kernels.calls import join_calls, result
from decoding.memory import use_large_pages
from decoding.runners.compilation import CompiledBlocks, without_guards
from decoding.runners.graphs import OutputsT

Structure = tuple[str, ...]
"""The names of the operators of a pass, in their order."""


class Tapes:
    """A `PassRecorder` for a CPU; `blocks` calls the compiled blocks of the passes, if blocks are compiled.

    Of each structure, the first pass is recorded twice. If the recordings differ, because the pass reads numbers on the host
    or does not use the same memory each time, passes of that structure run unrecorded from then on, with a warning.
    """

    def __init__(self, blocks: CompiledBlocks | None = None) -> None:
        self.num_recorded = 0
        self.problems: dict[Structure, str | None] = {}
        """For each structure so far, why its passes cannot be replayed; None if they can."""
        self._blocks = blocks

    def record(self, run: Callable[[], OutputsT]) -> tuple[OutputsT, Callable[[], OutputsT]]:
        """Run and record; see `PassRecorder.record`. A pass under autograd is not recorded."""
        outputs = run()  # compiles, and makes the memory that later passes find
        if torch.is_grad_enabled():
            return outputs, without_guards(run)
        self.num_recorded += 1
        recording = _Recording(run, self._blocks)
        structure = recording.structure
        if structure not in self.problems:
            self.problems[structure] = reason = recording.problem(_Recording(run, self._blocks))
            if reason is not None:
                warnings.warn(f"a pass cannot be recorded and runs slower: {reason}", stacklevel=2)
        use_large_pages(recording.memory)
        return outputs, without_guards(run) if self.problems[structure] else recording.player()


class _Tape(TorchDispatchMode):
    """Notes every operator while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.memory: list[Tensor] = []
        """Tensors that the pass uses and has not made: weights, keys and values, and inputs."""
        self.host_reads: list[str] = []
        """Operators that returned numbers to the host, which a replay would not compute again."""
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Tensor] = []
        """Every tensor of the pass, so that no two of them have the same id."""
        self._first_call = self.graph.call_function(_no_operation)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        outputs = function(*args, **(kwargs or {}))
        self.note(function, args, kwargs or {}, outputs)
        return outputs

    def note(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> None:
        """Append a call and its results: None, a tensor, or a sequence of these."""
        call = self.graph.call_function(function, self._known(tuple(args)), self._known(dict(kwargs)))
        if isinstance(outputs, Tensor):
            self._keep(outputs, call)
            return
        for index, each in enumerate(outputs if isinstance(outputs, list | tuple) else [outputs]):
            if isinstance(each, Tensor):
                self._keep(each, self.graph.call_function(result, (call, index)))
            elif each is not None:
                self.host_reads.append(str(function))

    def close(self, outputs: Iterable[Tensor]) -> None:
        self.graph.output(tuple(map(self._node_of, outputs)))
        self.graph.erase_node(self._first_call)
        self._nodes.clear()
        self._alive.clear()

    def _node_of(self, tensor: Tensor) -> fx.Node:
        """Return the node of a tensor; one that no operator of the pass has made is memory from outside."""
        if id(tensor) not in self._nodes:
            with self.graph.inserting_before(self._first_call):
                self._nodes[id(tensor)] = self.graph.placeholder(f"memory_{len(self.memory)}")
            self.memory.append(tensor)
        return self._nodes[id(tensor)]

    def _keep(self, tensor: Tensor, node: fx.Node) -> None:
        self._alive.append(tensor)
        self._nodes.setdefault(id(tensor), node)  # an operator in place returns a tensor that is known

    def _known(self, values: Any) -> Any:
        return _mapped(values, self._node_of)


class _Recording(Generic[OutputsT]):
    """A recorded pass."""

    def __init__(self, run: Callable[[], OutputsT], blocks: CompiledBlocks | None) -> None:
        self._tape = _Tape()
        with self._tape, blocks.noted_by(self._tape.note) if blocks else nullcontext():
            self._outputs = run()
        self._tape.close(_tensors(self._outputs))

    @property
    def structure(self) -> Structure:
        """The operators that ran. Passes of other widths, at other contexts or of other layers may have the same."""
        return tuple(str(node.target) for node in self._tape.graph.nodes if node.op == "call_function")

    @property
    def memory(self) -> Sequence[Tensor]:
        return self._tape.memory

    def problem(self, other: _Recording[OutputsT]) -> str | None:
        """Return why the pass cannot be replayed, judged by another recording of it; None if it can."""
        own, others = self._tape, other._tape
        if own.host_reads:
            return f"it reads numbers on the host: {own.host_reads[0]}"
        if _calls(own.graph) != _calls(others.graph):
            return "it does not run the same operators each time"
        if any(mine is not theirs for mine, theirs in zip(own.memory, others.memory, strict=True)):
            return "it does not use the same memory each time"
        return None

    def player(self) -> Callable[[], OutputsT]:
        """Return the function that runs the pass again; to be called once. It keeps memory from outside alive, and no results."""
        graph = self._tape.graph
        inputs: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), self._tape.memory, strict=True))
        join_calls(graph, inputs)
        for node in [node for node in inputs if not node.users]:
            graph.erase_node(node)
            del inputs[node]
        # Not an `fx.GraphModule`, which keeps the graph, of many times the function's memory, and its source for ever.
        code = graph.python_code("_")
        scope = dict(code.globals)
        exec(code.src, scope)
        # Taken out of its own globals: a function in a cycle would keep weights until a garbage collection.
        compute: Callable[..., tuple[Tensor, ...]] = partial(scope.pop("forward"), None)
        memory, template = tuple(inputs.values()), _mapped(self._outputs, lambda _: _TENSOR)

        def play() -> OutputsT:
            return cast(OutputsT, _filled(template, iter(compute(*memory))))

        return play


_TENSOR = object()
"""Stands for a tensor in the template of a pass's outputs."""


def _calls(graph: fx.Graph) -> list[Any]:
    return [(node.op, node.target, str(node.args), str(node.kwargs)) for node in graph.nodes]


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested dataclasses and containers, in order."""
    found: list[Tensor] = []
    _mapped(value, found.append)
    return found


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return nested dataclasses and containers with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(_mapped(getattr(value, field.name), change) for field in fields(value)))
    if isinstance(value, list | tuple):
        return type(value)(_mapped(each, change) for each in value)
    if isinstance(value, dict):
        return {name: _mapped(each, change) for name, each in value.items()}
    return value


def _filled(template: Any, values: Iterator[Tensor]) -> Any:
    """Return the outputs with the next of `values` wherever the template has a tensor."""
    if template is _TENSOR:
        return next(values)
    if is_dataclass(template) and not isinstance(template, type):
        own = (_filled(getattr(template, field.name), values) for field in fields(template))
        return type(template)(*own)
    return template


def _no_operation() -> None:
    """Stand between the memory of a pass and its first operator, in the graph."""
