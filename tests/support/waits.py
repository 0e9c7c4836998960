"""Counts how often the host reads a number from a tensor: on a device each read is a wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor


@contextmanager
def waits() -> Iterator[list[str]]:
    """Record the ways in which numbers are read in the meantime, in order."""
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
            genuine = getattr(Tensor, name)

            def watched(tensor: Tensor, genuine: Callable[..., Any] = genuine, name: str = name) -> Any:
                asked.append(name)
                return genuine(tensor)

            patch.setattr(Tensor, name, watched)
        yield asked
