"""The steps of a search whose results another process can take over, so that a finished one is not repeated.

A step's result is data that pydantic can write as JSON. What only makes measuring possible in this process, such as loading the
model and decoding prompts plainly, is no step. Trials are kept by the storage, one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Steps(Protocol):
    """Runs the steps of one search, in an order that depends on its configuration only."""

    def run(self, name: str, work: Callable[[], T], kind: Any) -> T:
        """Return the result of the step `name`: of `work`, or the earlier one. `kind` is the type of the result, for pydantic."""


class UnsavedSteps:
    """Steps of a search that one process runs: each is done when it is asked for."""

    def run(self, name: str, work: Callable[[], T], kind: Any) -> T:
        """See `Steps.run`."""
        return work()
