"""The contract between a published skip-set search and the study that runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import optuna

from decoding.draft_length import DraftLengthRule, TopProbability
from decoding.drafts import LayerSkip
from decoding.target import Target
from studies.contract import Problem, TrialRecord
from studies.searches.skip_sets.settings import SkipSetsSettings


class Method(ABC):
    """One way to choose skip sets. Its state changes in `observe` alone, never in `propose`.

    Each step has a random stream of its own, seeded by the problem's seed and the step's number, so that a resumed search
    continues as if it had not been stopped.
    """

    whole_blocks: ClassVar[bool] = False
    """True if only whole blocks are skipped, so that the model need not have separate attention and MLP modules."""

    proposes_beside: ClassVar[bool] = False
    """True if sets may be proposed while others are measured: their choice, by Optuna, takes running trials into account."""

    draft_length: ClassVar[DraftLengthRule] = TopProbability(threshold=0.6, max_tokens=12)
    """Rule that its skip sets are measured with, unless the settings name one (ours, as in conf_layers)."""

    def __init__(self, problem: Problem, settings: SkipSetsSettings) -> None:
        self.problem = problem
        self.settings = settings

    @classmethod  # noqa: B027 - most settings fit every model
    def check(cls, settings: SkipSetsSettings, target: Target) -> None:
        """Raise ValueError for settings that leave nothing to skip in this model."""

    @abstractmethod
    def propose(self, trial: optuna.Trial, num_trials: int) -> tuple[LayerSkip, dict[str, Any]]:
        """Return the set to measure after `num_trials` finished trials, and the notes of its record."""

    def observe(self, record: TrialRecord) -> None:  # noqa: B027 - the sampler may keep all state
        """Learn how a trial ended."""

    def finished(self) -> str | None:
        """Return the reason that the method itself ends, or None. Limits are applied by `studies.limits`."""
        return None

    def starts(self) -> list[dict[str, Any]]:
        """Return parameter values to try first (`StudySetup.starts`)."""
        return []

    def sampler(self) -> optuna.samplers.BaseSampler:
        """Return Optuna's sampler for the parameters that `propose` suggests; most methods choose sets themselves."""
        return optuna.samplers.RandomSampler(seed=self.problem.seed)
