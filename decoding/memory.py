"""Memory: errors that mean that it is missing, and the garbage collector kept out of short critical stretches."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_CPU_SHORTAGE = "DefaultCPUAllocator"
"""Name of the allocator: its words differ by operating system."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if torch, the driver or the CPU had no memory left.

    The driver keeps recorded graphs in memory of its own, and the CPU's shortage has no class of its own.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, torch.AcceleratorError):
        return "out of memory" in str(error)
    return isinstance(error, RuntimeError) and _CPU_SHORTAGE in str(error)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Keep Python's garbage collector from running in the middle of a measurement or of a recording.

    In a measurement it costs time. In a recording of CUDA work it may destroy an earlier recording, which invalidates
    the one under way.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
