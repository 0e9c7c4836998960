"""Candidates that are known to be good, measured anew before other studies begin: the best of an earlier search.

Old figures are not taken over. Model, data and machine may have changed since, and a score is what was measured here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from pydantic import Field

from studies.contract import Candidate, Problem, Study, StudySettings, TrialRecord


class WarmStartSettings(StudySettings):
    """Settings of a warm start."""

    candidates: tuple[Candidate, ...] = Field((), description="drafts with their rules, to measure in this order")


class WarmStart(Study):
    """Each candidate once, in the order given."""

    name = "warm_start"
    Settings = WarmStartSettings

    def __init__(self, problem: Problem, settings: WarmStartSettings) -> None:
        super().__init__(problem, settings)
        self._left: Mapping[str, Candidate] = {
            each.key: each for each in settings.candidates if problem.accepts(each.draft)
        }

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """Return the next candidate."""
        candidate = next(iter(self._left.values()))
        self._forget(candidate)
        return candidate, {}

    def observe(self, record: TrialRecord) -> None:
        """Leave out what was measured before this process."""
        self._forget(record.candidate)

    def proposes_beside(self, pending: Sequence[Candidate]) -> bool:
        """Return True while candidates are left: none depends on another one's trial."""
        return bool(self._left)

    def finished(self) -> str | None:
        """Return a reason if no candidate is left."""
        return None if self._left else "all known candidates were measured"

    def _forget(self, candidate: Candidate) -> None:
        self._left = {key: each for key, each in self._left.items() if key != candidate.key}
