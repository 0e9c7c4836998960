"""CUDA graphs: a pass is recorded once and replayed at the cost of one launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

import torch

from decoding.errors import one_line

WARM_UPS = 2


class Copyable(Protocol):
    """Outputs that can be copied out of a recording's memory."""

    def copied(self) -> Self:
        """Return a copy in separate memory."""


OutputsT = TypeVar("OutputsT", bound=Copyable)


def record(run: Callable[[], OutputsT], pool: Any = None) -> Callable[[], OutputsT]:
    """Return `run` as a recording that shares the memory `pool` with others.

    Its outputs are copies, so that replaying another recording does not change them. A pass that cannot be recorded,
    because it waits for the host, is returned unchanged with a warning.
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
        reason = one_line(cause)[:200]
        warnings.warn(f"a pass cannot be recorded as a CUDA graph and runs slower: {reason}", stacklevel=2)
        torch.cuda.synchronize()
        return run

    def play() -> OutputsT:
        graph.replay()
        return outputs.copied()

    return play
