"""The contract between a rival search and the study that runs it: which skip set next, no more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import optuna

from decoding.drafts import LayerSkip
from decoding.target import Target
from studies.contract import Problem, TrialRecord
from studies.searches.skip_sets.settings import SkipSetsSettings


class Method(ABC):
    """One way to choose skip sets. Its state is rebuilt by `observe` alone; `propose` leaves it as it is.

    Random numbers come from streams of their own for each step, seeded by the problem's seed and the step's number, so that
    a search that was stopped goes on as if it had not been.
    """

    whole_blocks: ClassVar[bool] = False
    """Whether only whole blocks are left out, so that a model need not show attention and MLP apart."""

    def __init__(self, problem: Problem, settings: SkipSetsSettings) -> None:
        self.problem = problem
        self.settings = settings

    @classmethod  # noqa: B027 - most settings fit every model
    def check(cls, settings: SkipSetsSettings, target: Target) -> None:
        """Raise ValueError for settings that leave this model nothing to skip."""

    @abstractmethod
    def propose(self, trial: optuna.Trial, place: int) -> tuple[LayerSkip, dict[str, Any]]:
        """The set to measure behind `place` finished trials, and the notes to find in the record."""

    def observe(self, record: TrialRecord) -> None:  # noqa: B027 - a search need not learn
        """Learn how a trial ended."""

    def finished(self) -> str | None:
        """Why the search itself ends, or None; trials and patience are the study's business."""
        return None

    def starts(self) -> list[dict[str, Any]]:
        """See `Study.starts`."""
        return []

    def sampler(self) -> optuna.samplers.BaseSampler:
        """Optuna's sampler for what `propose` suggests; most searches choose by themselves, and their sets are noted."""
        return optuna.samplers.RandomSampler(seed=self.problem.seed)
