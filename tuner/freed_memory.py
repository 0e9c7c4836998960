"""What becomes of freed memory: kept by the process for later, as usual, or given back to the system at once.

glibc keeps freed blocks of up to 32 MiB for later ones. Where blocks of many sizes come and go, they leave holes between what
stays: while drafts of SmolLM2-135M were surveyed, holes were nearly as large as all blocks in use. Keeping is right while passes
are timed, as a block from the system costs a page fault for every 4 KiB, and production keeps them too.

Address space is not given back with the memory in it: a block that fits into a hole from a stretch with kept blocks is put there,
and its memory stays until the end of the next such stretch.

Linux with glibc only: elsewhere these functions do nothing, and a search takes more memory.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LARGE = 2**22
"""Bytes of a block that is given back at once: less than the logits of a sequence, more than the states of a few tokens."""
USUAL = 2**25
"""Bytes up to which blocks are kept otherwise: glibc goes up to this limit by itself, once such blocks have been freed."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of glibc's settings, in `malloc.h`."""


@contextmanager
def large_blocks_given_back() -> Iterator[None]:
    """Give freed blocks of at least `LARGE` bytes back at once, and at both ends all that is free. Not for measurements."""
    _keep_less_than(LARGE)
    try:
        yield
    finally:
        _keep_less_than(USUAL)


@contextmanager
def freed_blocks_kept() -> Iterator[None]:
    """Keep freed blocks as usual, for a measurement within `large_blocks_given_back`; at both ends give back all that is free."""
    _keep_less_than(USUAL)
    try:
        yield
    finally:
        _keep_less_than(LARGE)


def _keep_less_than(num_bytes: int) -> None:
    """Give back what is free, and from now on each block of at least `num_bytes` as soon as it is freed."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_MMAP_THRESHOLD, num_bytes)
        libc.mallopt(_TRIM_THRESHOLD, 2 * num_bytes)  # glibc's own ratio
        libc.malloc_trim(0)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """Return the process's C library if it is glibc."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return None
    libc.mallopt.argtypes, libc.mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    libc.malloc_trim.argtypes, libc.malloc_trim.restype = [ctypes.c_size_t], ctypes.c_int
    return libc
