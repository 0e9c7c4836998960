"""The contract of a step of the GPU benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tuner.evaluation.gpu.shared import Shared

Result = dict[str, Any]
"""Plain data, as JSON holds it."""


class GpuStep(Protocol):
    """One question to a GPU: it runs in the process that keeps the models, and its result is on disk as it ends."""

    @property
    def name(self) -> str:
        """Name in files and tables."""

    @property
    def question(self) -> str:
        """The question that the result answers, in one line."""

    @property
    def limit_seconds(self) -> float:
        """Seconds that the plan reserves for the step, making the models that it is the first to need included."""

    @property
    def pessimistic_seconds(self) -> float:
        """Seconds on one H100 if everything is slow: our estimate, not measured."""

    def run(self, shared: Shared, seconds: float) -> Result:
        """Answer the question within `seconds`. May raise anything: the cause is the step's outcome."""

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        """Yield what the table shows of a result: a few short lines."""


class OutOfTimeError(Exception):
    """A step ended early, as it was interrupted, with the part of its result that it has."""

    def __init__(self, result: Result) -> None:
        self.result = result
        super().__init__("interrupted")
