"""The attention kernels among which torch may choose on CUDA."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""In order of preference. cuDNN is left out: it plans anew for each shape, 40 to 400 ms in reports, also while timing."""
_IN_ORDER = {"set_priority": True} if "set_priority" in inspect.signature(sdpa_kernel).parameters else {}


_RESTRICTED = threading.RLock()
"""Held while the restriction lasts, which is that of the whole process: the last thread to end would keep another's."""


def attention_backends(device: torch.device) -> AbstractContextManager[None]:
    """Restrict attention to `BACKENDS` for passes on a CUDA device; torch's own settings return afterwards."""
    return _restricted() if device.type == "cuda" else nullcontext()


@contextmanager
def _restricted() -> Iterator[None]:
    with _RESTRICTED, sdpa_kernel(BACKENDS, **_IN_ORDER):
        yield
