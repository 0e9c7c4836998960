"""Keeping Python's cyclic garbage collector out of short critical stretches."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
