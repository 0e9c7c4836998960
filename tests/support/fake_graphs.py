"""CUDA graphs on a CPU: a pass is recorded operator by operator and replayed in the same memory.

Replaying follows the rules of a real graph, and makes a pass that breaks them fail:

* no Python runs, so whatever was a plain number in the recording stays what it was;
* memory that the recorded pass allocated has no defined contents before a replay or after it: it is poisoned;
* other memory is referred to by address: it is not kept alive, and reading it after it was freed is an error;
* recording computes nothing: the effects of the recorded pass are undone;
* waiting for the host while recording is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from decoding.runners.graphs import OutputsT

WAITS = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",
        "_unique",
        "_unique2",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "lift_fresh",  # makes a tensor of numbers on the host
        "masked_select",
        "multinomial",
        "nonzero",
        "repeat_interleave.Tensor",
        "unique_consecutive",
        "unique_dim",
    )
)
"""Operators that read a device's numbers on the host, or copy numbers of the host in unpinned memory."""

HOST_READS = frozenset({Tensor.cpu, Tensor.numpy, Tensor.tolist, torch.as_tensor})
"""Functions that do so on a device, and run no operator on a CPU."""


class RecordingError(AssertionError):
    """A recorded pass does what a CUDA graph cannot do, or what its replay would do wrong."""


@dataclass(frozen=True)
class _Address:
    """A tensor as a recording knows it: an extent of memory that may have been freed since."""

    storage: StorageWeakRef
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> _Address:
        storage = StorageWeakRef(tensor.untyped_storage())
        return cls(storage, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())

    def tensor(self) -> Tensor:
        if self.storage.expired():
            raise RecordingError(f"a recording uses memory that was freed: {list(self.size)} of {self.dtype}")
        # torch declares neither of the two functions.
        memory: Any = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)  # type: ignore[attr-defined]
        return torch.empty(0, dtype=self.dtype).set_(memory, self.offset, self.size, self.stride)


def _mapped(values: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Change the values of one kind in nested containers; torch's own function takes longer than most operators."""
    if isinstance(values, kind):
        return change(values)
    if isinstance(values, list | tuple):
        return type(values)([_mapped(value, kind, change) for value in values])
    if isinstance(values, dict):
        return {name: _mapped(value, kind, change) for name, value in values.items()}
    return values


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(values, Tensor, found.append)
    return found


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Step:
    """One operator of a recorded pass."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, results: list[_Address | None]) -> None:
        self._function = function
        self._args, self._kwargs = args, kwargs
        """The arguments, tensors as addresses."""
        self._results: list[Any] = results
        """The results in memory that the operator allocated; None for one in memory of its arguments."""
        self._look_ups: list[tuple[int, _Address]] = []
        """Arguments in memory of others, which is looked up in each replay, by index."""
        self._are_nested = False

    def bind(self, produced: Mapping[int, Tensor]) -> None:
        """Hold the memory of the recording itself, which needs no look-up in a replay."""

        def bound(memory: _Address) -> Tensor | _Address:
            return memory.tensor() if memory.storage.cdata in produced else memory

        self._args, self._kwargs, self._results = _mapped((self._args, self._kwargs, self._results), _Address, bound)
        external: list[_Address] = []
        _mapped((self._args, self._kwargs), _Address, external.append)
        self._look_ups = [(index, each) for index, each in enumerate(self._args) if isinstance(each, _Address)]
        self._are_nested = len(external) > len(self._look_ups)

    def play(self) -> None:
        args, kwargs = self._args, self._kwargs
        if self._are_nested:
            args, kwargs = _mapped((args, kwargs), _Address, _Address.tensor)
        elif self._look_ups:
            args = [*args]
            for index, memory in self._look_ups:
                args[index] = memory.tensor()
        for kept, value in zip(self._results, _tensors(self._function(*args, **kwargs)), strict=True):
            if kept is not None:
                kept.copy_(value)


class _NoHostReads(TorchFunctionMode):
    """Raises for functions that wait on a device only."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in HOST_READS:
            raise RecordingError(f"a recorded pass waits for the host: {function.__name__}")
        return function(*args, **(kwargs or {}))


class _Recording(TorchDispatchMode):
    """Notes every operator while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.produced: dict[int, Tensor] = {}
        """Memory allocated by the pass, kept alive as the pool of a graph keeps it."""
        self.externals: dict[int, _Address] = {}
        """Memory that was there before."""
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        """Other memory that the pass has written to, with its contents before."""
        self._memory: dict[torch.dtype, list[Tensor]] = {}
        """All memory allocated by the pass, by type: one call spoils many tensors."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        schema = function._schema
        _refuse_waits(schema.name, schema.overload_name, args)
        given = _tensors((args, kwargs))
        for tensor in given:
            if _key(tensor) not in self.produced:
                self.externals.setdefault(_key(tensor), _Address.of(tensor))
        if schema.is_mutable:
            self._keep_contents(given)
        places = _mapped((args, kwargs), Tensor, _Address.of)
        output = function(*args, **kwargs)
        results = [self._allocated(tensor) for tensor in _tensors(output)]
        is_view = not schema.is_mutable and not any(results)
        if not is_view and not schema.name.startswith("aten::empty"):  # allocating computes nothing
            self.steps.append(_Step(function, *places, results))
        return output

    def _allocated(self, result: Tensor) -> _Address | None:
        if _key(result) in self.externals:
            return None
        is_new = _key(result) not in self.produced
        self.produced.setdefault(_key(result), result.detach())
        return _Address.of(result) if is_new else None

    def _keep_contents(self, given: Iterable[Tensor]) -> None:
        for tensor in given:
            if _key(tensor) in self.externals and _key(tensor) not in self._before:
                whole = _whole(tensor)
                self._before[_key(tensor)] = whole, whole.clone()

    def undo(self) -> None:
        """Restore the memory that the pass has written to and not allocated."""
        for memory, contents in self._before.values():
            memory.copy_(contents)
        self._before.clear()

    def bind(self) -> None:
        """Prepare replays."""
        for memory in map(_whole, self.produced.values()):
            self._memory.setdefault(memory.dtype, []).append(memory)
        for step in self.steps:
            step.bind(self.produced)

    def poison(self) -> None:
        """Fill the memory of the pass with values that spoil whatever is computed from them."""
        for dtype, memories in self._memory.items():
            if dtype.is_floating_point:
                torch._foreach_add_(memories, float("nan"))
            elif dtype == torch.bool:
                for memory in memories:
                    memory.fill_(True)
            else:
                torch._foreach_zero_(memories)
                torch._foreach_add_(memories, torch.iinfo(dtype).max // 2)


def _refuse_waits(name: str, overload: str, args: tuple[Any, ...]) -> None:
    indices = args[1] if name.startswith("aten::index") and len(args) > 1 and isinstance(args[1], list | tuple) else ()
    by_mask = any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)
    if {name, f"{name}.{overload}"} & WAITS or by_mask:
        raise RecordingError(f"a recorded pass waits for the host: {name}{' with a mask' if by_mask else ''}")


def _whole(tensor: Tensor) -> Tensor:
    """All memory of a tensor's storage as one vector of its type."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


class FakeGraph:
    """One recorded pass."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._recording = _Recording()
        with _NoHostReads(), self._recording:
            self.outputs = run()
        self.recorded_outputs = self.outputs.copied()
        """What a real graph would leave undefined: recording computes nothing."""
        with torch.inference_mode():
            self._recording.undo()
            self._recording.bind()
            self._recording.poison()

    def replay(self) -> None:
        """Run the operators of the pass again."""
        with torch.inference_mode():
            self._recording.poison()
            for step in self._recording.steps:
                step.play()

    def finish(self) -> None:
        """Let other recordings use the memory of the pass."""
        with torch.inference_mode():
            self._recording.poison()

    @property
    def externals(self) -> dict[int, _Address]:
        """Memory that the pass has not allocated itself and that is still there, by address."""
        return {key: memory for key, memory in self._recording.externals.items() if not memory.storage.expired()}


class FakeGraphs:
    """A `PassRecorder` that records `FakeGraph`s."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0
        self._graphs: weakref.WeakSet[FakeGraph] = weakref.WeakSet()

    def record(self, run: Callable[[], OutputsT]) -> tuple[OutputsT, Callable[[], OutputsT]]:
        """Run and record; see `PassRecorder.record`."""
        self.num_recorded += 1
        outputs = run().copied()
        graph = self.new_graph(run)
        self._graphs.add(graph)

        def play() -> OutputsT:
            self.num_replayed += 1
            return self.play(graph)

        return outputs, play

    def new_graph(self, run: Callable[[], Any]) -> FakeGraph:
        """Record a pass."""
        return FakeGraph(run)

    def play(self, graph: FakeGraph) -> Any:
        """Replay a pass and return a copy of its outputs."""
        graph.replay()
        outputs = graph.outputs.copied()
        graph.finish()
        return outputs

    def strangers(self, *owners: object) -> list[_Address]:
        """Return what the recordings read and that is neither theirs nor reachable from `owners`.

        It would be temporary memory of whatever called the pass.
        """
        owned = {_key(tensor) for tensor in owned_tensors(owners)}
        externals = [item for graph in self._graphs for item in graph.externals.items()]
        return [memory for key, memory in externals if key not in owned]


def owned_tensors(owner: object) -> Iterator[Tensor]:
    """Yield the tensors that objects of this project hold: weights, keys and values, input buffers.

    Follows attributes and plain containers, but no functions: a recording's own function owns nothing.
    """
    seen: set[int] = set()
    pending = [owner]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            pending += value.values()
            pending += value.keys()
        elif isinstance(value, list | tuple | set | frozenset):
            pending += value
        elif isinstance(value, nn.Module) or type(value).__module__.split(".")[0] in ("decoding", "transformers"):
            pending += vars(value).values() if hasattr(value, "__dict__") else ()
            pending += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
