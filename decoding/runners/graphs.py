"""CUDA graphs: a pass is recorded once and played back at the cost of one launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

import torch

WARM_UPS = 2


class Copied(Protocol):
    """What a pass gives."""

    def copied(self) -> Self:
        """The same in memory of its own."""


Given = TypeVar("Given", bound=Copied)


def record(run: Callable[[], Given], pool: Any = None) -> Callable[[], Given]:
    """`run` as a recording that shares the memory `pool` with others; its outputs are copies, so that playing another does not
    change them. A pass that cannot be recorded, because it waits for the host, is run as it is, and a warning says so.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            outputs = run()
    except RuntimeError as cause:
        reason = " ".join(str(cause).split())[:200]
        warnings.warn(f"a pass is not recorded as a CUDA graph and is slower for it: {reason}", stacklevel=2)
        torch.cuda.synchronize()
        return run

    def play() -> Given:
        graph.replay()
        return outputs.copied()

    return play
