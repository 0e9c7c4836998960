"""Memory: errors that mean that it is missing, large pages, and the garbage collector kept out of short critical stretches."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_CPU_SHORTAGE = "DefaultCPUAllocator"
"""Name of the allocator: its words differ by operating system."""

LARGE_PAGE = 2**21
"""Bytes of a large page."""
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
"""Linux's numbers of what it is advised, from `sys/mman.h`: large pages from now on, and (Linux 6.1) for what is there already."""


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


def is_plain(tensor: Tensor) -> bool:
    """Return True unless the tensor is of a class or a layout of its own, which need not have its values at an address."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def use_large_pages(tensors: Iterable[Tensor]) -> None:
    """Ask the system to keep the memory of tensors on the host in pages of 2 MiB.

    A pass reads all weights: many more pages of 4 KiB than a processor's TLB holds, and a miss takes up to 24 reads of memory in a
    virtual machine. Addresses stay as they are. Only Linux is asked, and it may decline.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in _stretches(tensors):
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            madvise(start, end - start, advice)


def _stretches(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the stretches of whole large pages between tensors that are less than a large page apart."""
    plain = [each.untyped_storage() for each in tensors if is_plain(each)]
    storages = {each.data_ptr(): each.nbytes() for each in plain}
    places = sorted((start, start + size) for start, size in storages.items() if start)
    while places:
        start, end = places.pop(0)
        while places and places[0][0] < end + LARGE_PAGE:
            end = max(end, places.pop(0)[1])
        start, end = -(-start // LARGE_PAGE) * LARGE_PAGE, end // LARGE_PAGE * LARGE_PAGE
        if start < end:
            yield start, end
