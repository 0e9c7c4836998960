"""Recognition of errors that mean missing memory, whichever part of torch raises them."""

from __future__ import annotations

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
