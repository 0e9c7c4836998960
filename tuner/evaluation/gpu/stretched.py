"""A step with a longer limit, for devices slower than the one that the plan is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tuner.evaluation.gpu.contract import GpuStep, Result
from tuner.evaluation.gpu.shared import Shared


@dataclass(frozen=True)
class Stretched:
    """A step whose limit is multiplied by `factor`."""

    step: GpuStep
    factor: float

    @property
    def name(self) -> str:
        """See `GpuStep.name`."""
        return self.step.name

    @property
    def question(self) -> str:
        """See `GpuStep.question`."""
        return self.step.question

    @property
    def limit_seconds(self) -> float:
        """See `GpuStep.limit_seconds`."""
        return self.step.limit_seconds * self.factor

    @property
    def pessimistic_seconds(self) -> float:
        """See `GpuStep.pessimistic_seconds`."""
        return self.step.pessimistic_seconds * self.factor

    def run(self, shared: Shared, seconds: float) -> Result:
        """See `GpuStep.run`."""
        return self.step.run(shared, seconds)

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        """See `GpuStep.lines`."""
        return self.step.lines(result)
