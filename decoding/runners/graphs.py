"""CUDA graphs: a pass is recorded once and replayed at the cost of one launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, Self, TypeVar

import torch

from decoding.errors import one_line
from decoding.garbage_collection import without_garbage_collection


class Copyable(Protocol):
    """Outputs that can be copied out of a recording's memory."""

    def copied(self) -> Self:
        """Return a copy in separate memory."""


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
    """

    def __init__(self, device: torch.device) -> None:
        self.num_recorded = 0
        self._device = device
        self._stream: Any = None
        self._pool: Any = None
        self._sentinel: Any = None
        """A recording of nothing much: it keeps the pool when all others are gone."""

    def record(self, run: Callable[[], OutputsT]) -> tuple[OutputsT, Callable[[], OutputsT]]:
        """Run and capture; see `PassRecorder.record`.

        The outputs are copies, so that replaying another recording does not change them. A pass that cannot be
        captured, because it waits for the host, runs unrecorded from then on, with a warning. Raises
        `torch.OutOfMemoryError` if the device has no memory left for the recording.
        """
        self.num_recorded += 1
        with torch.cuda.device(self._device):
            self._open()
            outputs = self._on_stream(run).copied()  # compiles, loads kernels and sets up libraries: not capturable
            try:
                graph, recorded = self._capture(run)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as cause:
                reason = one_line(cause)[:200]
                warnings.warn(f"a pass cannot be recorded as a CUDA graph and runs slower: {reason}", stacklevel=2)
                return outputs, run

        def play() -> OutputsT:
            with torch.cuda.device(self._device):
                graph.replay()
                return recorded.copied()

        return outputs, play

    def _open(self) -> None:
        """Make the stream, the pool and the sentinel at the first recording."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._sentinel, _ = self._capture(lambda: torch.zeros(1, device=self._device))

    def _on_stream(self, run: Callable[[], OutputsT]) -> OutputsT:
        """Run on the stream of the captures, ordered before and after the work of the current stream."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            outputs = run()
        current.wait_stream(self._stream)
        return outputs

    def _capture(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with without_garbage_collection(), _fresh_cublas_workspaces(), torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                outputs = run()
            except BaseException:
                self._abandon(graph)
                raise
            try:
                graph.capture_end()
            except BaseException:
                self._abandon(graph, ended=True)
                raise
        return graph, outputs

    def _abandon(self, graph: torch.cuda.CUDAGraph, *, ended: bool = False) -> None:
        """End a failed capture, and start a new pool: the old one may be left in the state of recording."""
        pool, self._pool, self._sentinel = self._pool, None, None
        steps: list[Callable[[], object]] = [] if ended else [graph.capture_end]
        steps.append(lambda: torch._C._cuda_endAllocateToPool(self._index, pool))
        for step in steps:
            # Each may fail because the capture is invalid already. The error that began it all is the one reported.
            with suppress(RuntimeError):
                step()

    @property
    def _index(self) -> int:
        index = self._device.index
        return torch.cuda.current_device() if index is None else index


@contextmanager
def _fresh_cublas_workspaces() -> Iterator[None]:
    """Keep cuBLAS workspaces of a capture in its pool, and those of other work out of it.

    torch frees the workspaces of a stream when one recording made on it is destroyed (pytorch issue 193402), so no
    later recording may use the same memory. Inductor's CUDA graphs do the same.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
