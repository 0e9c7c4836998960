"""A model of `torch.cuda` without a device: streams, captures, and the memory pools of CUDA graphs.

It follows torch's C++ sources (aten/src/ATen/cuda/CUDAGraph.cpp and c10/cuda/CUDACachingAllocator.cpp, torch 2.11 to 2.13) in
what happens when something fails:

* an operation that a capture cannot hold invalidates it, and `capture_end` then raises before it ends the allocation of memory
  from the pool; ending it by hand leaves the pool of pinned host memory recording, so that the pool cannot be used again;
* a graph that has ended its capture owns a share of the pool and gives it back when it is destroyed; a failed one does not;
* destroying a graph while another is captured invalidates that capture, and frees the cuBLAS workspace of its stream;
* in torch 2.11 the default random generator believes in a failed capture until the next one has succeeded.

A pass is Python code that calls `Device.launch`: what it launches runs at once, or is recorded if its stream is captured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

NUM_STREAMS = 32
"""torch hands out the streams of a device in turns."""

Pool = tuple[int, int]


@dataclass(eq=False)
class StubStream:
    """A stream of one device; two objects may be the same stream."""

    cuda: StubCuda
    device: torch.device
    number: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StubStream) and (self.device, self.number) == (other.device, other.number)

    def __hash__(self) -> int:
        return hash((self.device, self.number))

    def wait_stream(self, other: StubStream) -> None:
        self.cuda.log.append(f"{self.number} waits for {other.number}")

    @property
    def capture(self) -> StubGraph | None:
        graph = self.cuda.capturing
        return graph if graph is not None and graph.seen is not None and graph.seen.stream == self else None


@dataclass
class PoolState:
    """A memory pool of graphs."""

    num_owners: int = 0
    is_recording: bool = False
    """Memory that a capture asks for comes from the pool."""
    is_recording_on_host: bool = False
    """The same of pinned memory, which only a successful `capture_end` ends."""


@dataclass
class Memory:
    """A number in a device's memory."""

    cuda: StubCuda
    device: int
    value: float = 0.0
    pool: Pool | None = None
    """The pool of graphs that it belongs to."""

    def copied(self) -> Memory:
        copy = self.cuda.allocate(self.device)
        self.cuda.launch(self.device, lambda: setattr(copy, "value", self.value))
        return copy


@dataclass
class Capture:
    """What was seen of a capture, whatever became of its graph."""

    stream: StubStream
    pool: Pool
    error_mode: str
    kernels: list[Callable[[], None]] = field(default_factory=list)
    workspaces: list[Memory] = field(default_factory=list)
    """cuBLAS workspaces that the recorded kernels write to."""


class StubGraph:
    """`torch.cuda.CUDAGraph`."""

    cuda: StubCuda

    def __init__(self) -> None:
        self.seen: Capture | None = None
        self.is_invalid = False
        self.has_ended = False

    def capture_begin(
        self, pool: Pool | None = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        cuda, stream = self.cuda, self.cuda.current_stream()
        if stream.number == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self.seen = Capture(stream, pool or cuda.graph_pool_handle(), capture_error_mode)
        cuda.generator_captures = True
        cuda.begin_allocation(self.seen.pool)
        cuda.fail_if("capture_begin")
        cuda.capturing = self
        cuda.log.append("begin")
        cuda.captures.append(self.seen)

    def capture_end(self) -> None:
        cuda, seen = self.cuda, self.seen
        assert seen is not None
        if cuda.current_stream() != seen.stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        if cuda.capturing is not self:
            raise torch.AcceleratorError("CUDA error: the operation cannot be performed in the present state")
        cuda.capturing = None
        cuda.log.append("end")
        if self.is_invalid:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
        cuda.end_allocation(seen.stream.device.index, seen.pool)
        cuda.pools[seen.pool].is_recording_on_host = False
        cuda.generator_captures = False
        if not seen.kernels:
            cuda.log.append("empty")
        self.has_ended = True
        cuda.fail_if("instantiate")

    def replay(self) -> None:
        assert self.has_ended
        assert self.seen is not None
        self.cuda.log.append(f"replay on device {self.cuda.current_device()}")
        for kernel in self.seen.kernels:
            kernel()

    def invalidate(self) -> None:
        self.is_invalid = True

    def __del__(self) -> None:
        if self.has_ended:
            self.cuda.destroy(self)


@dataclass
class StubCuda:
    """The state of all devices, and the functions of `torch.cuda` that work on it."""

    num_devices: int = 2
    log: list[str] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    pools: dict[Pool, PoolState] = field(default_factory=dict)
    capturing: StubGraph | None = None
    generator_captures: bool = False
    workspaces: dict[StubStream, Memory] = field(default_factory=dict)
    freed: list[Memory] = field(default_factory=list)
    """Workspaces that were given back to the allocator."""
    failures: dict[str, list[RuntimeError]] = field(default_factory=dict)
    """Errors to come, by the operation that raises them."""
    device: int = 0
    current: dict[int, StubStream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._handles = itertools.count(1)
        self._turns = [itertools.cycle(range(1, NUM_STREAMS + 1)) for _ in range(self.num_devices)]
        for index in range(self.num_devices):
            self.current[index] = StubStream(self, torch.device("cuda", index), 0)

    # --- what a pass does ---------------------------------------------------------------------------------------------

    def launch(self, device: int, work: Callable[[], None]) -> None:
        """Run a kernel on the current stream of a device, or record it there."""
        capture = self._capture_on(device)
        if capture is None:
            work()
        else:
            capture.kernels.append(work)

    def multiply(self, device: int, work: Callable[[], None]) -> None:
        """Launch a kernel of cuBLAS, which needs the workspace of its stream."""
        workspace = self.workspaces.setdefault(self.current[device], self.allocate(device))
        if (capture := self._capture_on(device)) is not None:
            capture.workspaces.append(workspace)
        self.launch(device, work)

    def allocate(self, device: int) -> Memory:
        """Return memory, from the pool of the graph that the current stream is captured for."""
        self.fail_if("allocate")
        capture = self._capture_on(device)
        return Memory(self, device, pool=None if capture is None else capture.pool)

    def _capture_on(self, device: int) -> Capture | None:
        graph = self.current[device].capture
        return None if graph is None else graph.seen

    def wait(self, device: int) -> None:
        """Let the host wait for the current stream of a device."""
        graph = self.current[device].capture
        if graph is not None:
            graph.invalidate()
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")

    def draw(self) -> None:
        """Draw a random number from the default generator."""
        if self.generator_captures and self.capturing is None:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    def fail_if(self, operation: str) -> None:
        """Raise the next of the errors that a test has planned for the operation."""
        if self.failures.get(operation):
            raise self.failures[operation].pop(0)

    # --- the allocator ------------------------------------------------------------------------------------------------

    def graph_pool_handle(self) -> Pool:
        return (0, next(self._handles))

    def begin_allocation(self, pool: Pool) -> None:
        if pool in self.pools and not self.pools[pool].num_owners:
            raise RuntimeError("INTERNAL ASSERT FAILED: it->second->use_count > 0")
        state = self.pools.setdefault(pool, PoolState())
        state.num_owners += 1
        if state.is_recording or state.is_recording_on_host:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        state.is_recording = state.is_recording_on_host = True

    def end_allocation(self, device: int, pool: Pool) -> None:
        self._check_device(device)
        if pool not in self.pools or not self.pools[pool].is_recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools[pool].is_recording = False

    def release(self, device: int, pool: Pool) -> None:
        self._check_device(device)
        assert self.pools[pool].num_owners > 0, "INTERNAL ASSERT FAILED: uc >= 0"
        self.pools[pool].num_owners -= 1

    def _check_device(self, device: int) -> None:
        assert isinstance(device, int), "the functions of torch._C take an index"
        assert 0 <= device < self.num_devices

    def clear_workspaces(self) -> None:
        self.log.append("clear")
        self.freed += self.workspaces.values()
        self.workspaces.clear()

    def destroy(self, graph: StubGraph) -> None:
        if self.capturing is not None:
            self.capturing.invalidate()
        assert graph.seen is not None
        self.release(graph.seen.stream.device.index, graph.seen.pool)
        if (workspace := self.workspaces.pop(graph.seen.stream, None)) is not None:  # since torch 2.13
            self.freed.append(workspace)

    # --- torch.cuda ---------------------------------------------------------------------------------------------------

    def current_device(self) -> int:
        return self.device

    def current_stream(self, device: Any = None) -> StubStream:
        return self.current[self._index(device)]

    def new_stream(self, device: Any = None) -> StubStream:
        index = self._index(device)
        return StubStream(self, torch.device("cuda", index), next(self._turns[index]))

    def synchronize(self, device: Any = None) -> None:
        self.wait(self._index(device))

    def empty_cache(self) -> None:
        self.log.append("empty cache")

    @contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        before, self.device = self.device, self._index(device)
        try:
            yield
        finally:
            self.device = before

    @contextmanager
    def on_stream(self, stream: StubStream) -> Iterator[None]:
        device, before = self.device, self.current[stream.device.index]
        self.device, self.current[stream.device.index] = stream.device.index, stream
        try:
            yield
        finally:
            self.device, self.current[stream.device.index] = device, before

    def _index(self, device: Any) -> int:
        if device is None or (isinstance(device, torch.device) and device.index is None):
            return self.device
        return device if isinstance(device, int) else int(torch.device(device).index)

    def zeros(self, *size: int, device: Any = None) -> SimpleNamespace:
        index = self._index(device)
        memory = self.allocate(index)
        self.launch(index, lambda: setattr(memory, "value", 0.0))
        return SimpleNamespace(memory=memory, size=size)


@contextmanager
def stub_cuda() -> Iterator[StubCuda]:
    """Replace what `CudaGraphs` uses of torch by a model of two devices."""
    cuda = StubCuda()
    replacements: dict[str, Any] = {
        "torch.cuda.CUDAGraph": type("Graph", (StubGraph,), {"cuda": cuda}),
        "torch.cuda.Stream": cuda.new_stream,
        "torch.cuda.current_device": cuda.current_device,
        "torch.cuda.current_stream": cuda.current_stream,
        "torch.cuda.device": cuda.on_device,
        "torch.cuda.empty_cache": cuda.empty_cache,
        "torch.cuda.graph_pool_handle": cuda.graph_pool_handle,
        "torch.cuda.graph.default_capture_stream": None,
        "torch.cuda.stream": cuda.on_stream,
        "torch.cuda.synchronize": cuda.synchronize,
        "torch.zeros": cuda.zeros,
        "torch._C._cuda_clearCublasWorkspaces": cuda.clear_workspaces,
        "torch._C._cuda_endAllocateToPool": cuda.end_allocation,
        "torch._C._cuda_releasePool": cuda.release,
        "torch._C._host_emptyCache": lambda: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, replacement in replacements.items():
            patch.setattr(name, replacement, raising=False)
        yield cuda
