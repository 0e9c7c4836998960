"""Samplers that try given skip sets in order, in a space of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optuna
from optuna.trial import BaseTrial, FrozenTrial

from studies.contract import Candidate, Problem, StudySettings, TrialRecord
from studies.samplers.contract import Parameters, StudySampler, enqueue_in_new
from tests.support.records import candidate
from tests.support.tiny import tiny_target


class Numbered:
    """Skip sets by their numbers."""

    def __init__(self, sets: Sequence[Sequence[int]]) -> None:
        self.sets = list(sets)

    def suggest(self, trial: BaseTrial) -> Candidate:
        return candidate(self.sets[trial.suggest_int("index", 0, 99)])

    def identity(self) -> dict[str, Any]:
        return {}


class Scripted(StudySampler):
    """Tries the given skip sets in order, after `starts`."""

    name = "scripted"

    def __init__(
        self, sets: Sequence[Sequence[int]], *, starts: Sequence[Parameters] = (), follows: bool = True
    ) -> None:
        super().__init__(Problem(tiny_target(2), (), (), earlier={}, seed=0), StudySettings())
        self.space = Numbered(sets)
        self.observed: list[TrialRecord] = []
        self._starts = starts
        self.follows = follows  # type: ignore[misc]

    def begin(self, study: optuna.Study) -> None:
        enqueue_in_new(study, self._starts)

    def choose(self, study: optuna.Study, trial: FrozenTrial) -> Parameters:
        return {"index": len(self.observed) if self.follows else trial.number}

    def notes(self, candidate: Candidate) -> dict[str, Any]:
        return {"skipped": candidate.draft.describe()}

    def observe(self, record: TrialRecord) -> None:
        self.observed.append(record)

    def finished(self, study: optuna.Study) -> str | None:
        super().finished(study)
        return "all proposed" if len(self.observed) == len(self.space.sets) else None
