"""CUDA graphs: a pass is recorded once and replayed at the cost of one launch."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, Self, TypeVar

import torch

from decoding.errors import one_line
from decoding.memory import is_out_of_memory, without_garbage_collection


class Copyable(Protocol):
    """Outputs that can be copied out of a recording's memory."""

    def copied(self) -> Self: ...


OutputsT = TypeVar("OutputsT", bound=Copyable)


class PassRecorder(Protocol):
    """Records passes of one device, so that they can be replayed."""

    num_recorded: int
    """Number of passes recorded so far, failed recordings included."""

    def record(self, run: Callable[[], OutputsT]) -> tuple[OutputsT, Callable[[], OutputsT]]:
        """Run `run` and return its outputs, and a function that runs it again.

        `run` reads and writes fixed memory only, and running it twice has the effect of running it once.
        """


class CudaGraphs:
    """Records passes as CUDA graphs, which share one memory pool and are captured on one stream of one device.

    One stream for warm-ups and captures, because torch keeps a cuBLAS workspace per stream: a workspace that a warm-up
    allocated outside the pool must never be part of a recording.

    A pass may draw random numbers from the default generator of the device only: torch knows of no other in a capture.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_recorded = 0
        # The device that "cuda" means now: another may be the current one when a recording is replayed.
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device(device.type, self._index)
        self._stream: Any = None
        self._pool: Any = None
        self._sentinel: Any = None
        """A recording of one small tensor, which keeps the pool when all other recordings are gone."""
        self._latest: Any = None
        """The stream of the latest replay."""
        self._alone = threading.RLock()
        """Held from a replay until its outputs are copied, as recordings share their memory; and by each recording."""
        self._invalid: list[Any] = []
        """Graphs whose capture failed."""

    def record(self, run: Callable[[], OutputsT]) -> tuple[OutputsT, Callable[[], OutputsT]]:
        """Run and capture; see `PassRecorder.record`.

        The outputs are copies, so that replaying another recording does not change them. A pass that cannot be
        captured, because it waits for the host, runs unrecorded from then on, with a warning. Raises
        `torch.OutOfMemoryError` if the device has no memory left for the recording.
        """
        self.num_recorded += 1
        with self._alone, torch.cuda.device(self._device):
            self._open()
            with self._on_stream():  # compiles, loads kernels and sets up libraries: not capturable
                outputs = run()
            outputs = outputs.copied()
            try:
                graph, recorded = self._capture_with_memory(run)
                self._replay(graph)  # the first replay copies the graph to the device: timed replays do not include it
            except RuntimeError as cause:
                self._open()  # now: until a capture succeeds, torch 2.11 refuses to draw random numbers
                if is_out_of_memory(cause):
                    raise torch.OutOfMemoryError(str(cause)) from cause
                reason = one_line(cause)[:200]
                warnings.warn(f"a pass cannot be recorded as a CUDA graph and runs slower: {reason}", stacklevel=2)
                return outputs, run

        def play() -> OutputsT:
            with self._alone, torch.cuda.device(self._device):
                self._replay(graph)
                return recorded.copied()

        return outputs, play

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay on the current stream, after all that was replayed on another one: recordings share their memory."""
        current = torch.cuda.current_stream()
        if self._latest is not None and self._latest != current:
            current.wait_stream(self._latest)
        self._latest = current
        graph.replay()

    def _open(self) -> None:
        """Make the stream, the pool and the sentinel unless they are there."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._sentinel, _ = self._capture(lambda: torch.zeros(1, device=self._device))

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Use the stream of the captures, ordered before and after the work of the current stream."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def _capture_with_memory(self, run: Callable[[], OutputsT]) -> tuple[torch.cuda.CUDAGraph, OutputsT]:
        """Capture; if memory runs out, free what torch keeps for later work and try once more.

        During a capture torch does not free such memory by itself. Freeing it before every capture, as
        `torch.cuda.graph` does, would be slow.
        """
        try:
            return self._capture(run)
        except RuntimeError as cause:
            if not is_out_of_memory(cause):
                raise
        torch.cuda.empty_cache()
        self._open()
        return self._capture(run)

    def _capture(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with without_garbage_collection(), _fresh_cublas_workspaces(), torch.cuda.stream(self._stream):
            try:
                # The default mode would make what other threads do on the device fail, and this capture with it.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                outputs = run()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return graph, outputs

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a failed capture. The next one has a new pool.

        A capture that is valid can be ended, and its graph gives its share of the pool back when it is destroyed. One
        that an error has invalidated must be taken out of the pool by hand: `capture_end` raises before it does that
        (aten/src/ATen/cuda/CUDAGraph.cpp, the same in torch 2.11 to 2.13). The pool cannot be used again, because
        torch's allocator of pinned memory still waits for the end of the capture.
        """
        # Ending may fail too, if nothing has begun or all has ended. Only the first error is reported.
        with suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a graph that is empty
            graph.capture_end()
        try:
            torch._C._cuda_endAllocateToPool(self._index, self._pool)
        except RuntimeError:
            pass  # ended already
        else:
            torch._C._cuda_releasePool(self._index, self._pool)
            self._invalid.append(graph)  # the allocator of pinned memory keeps its address
        # Not earlier: destroying a recording during a capture would invalidate it.
        self._pool = self._sentinel = None


@contextmanager
def _fresh_cublas_workspaces() -> Iterator[None]:
    """Keep cuBLAS workspaces of a capture in its pool, and workspaces of other work out of it.

    torch frees the workspaces of a stream when one recording made on it is destroyed (pytorch issue 193402), so no
    later recording may use the same memory. Inductor's CUDA graphs do the same.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
