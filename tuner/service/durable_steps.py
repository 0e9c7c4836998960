"""The steps of a search, kept by DBOS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from dbos import DBOS
from pydantic import TypeAdapter

T = TypeVar("T")


class DurableSteps:
    """Steps of the workflow that runs in this thread; see `tuner.search.steps.Steps`."""

    def run(self, name: str, work: Callable[[], T], kind: Any) -> T:
        """See `Steps.run`. The result is what JSON gives back, so that both ways to it are the same."""
        adapter: TypeAdapter[T] = TypeAdapter(kind)

        def done() -> Any:
            return adapter.dump_python(work(), mode="json")

        return adapter.validate_python(DBOS.run_step({"name": name}, done))
