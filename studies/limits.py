"""Limits on any study: a number of trials, and patience."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optuna

from studies.contract import Candidate, Study, StudySetup, TrialRecord


class Limited(Study):
    """A study that also ends after `max_trials` trials, or `idle_limit` trials without a better measured speed-up.

    A wrapper, as Optuna's `PatientPruner` is one. `idle_limit` is None if idle trials are not limited.
    """

    def __init__(self, study: Study, max_trials: int, idle_limit: int | None = None) -> None:
        self.name = study.name
        self._study = study
        self._max_trials, self._idle_limit = max_trials, idle_limit
        self._num_trials = self._last_improvement = 0
        self._best = 0.0

    def setup(self) -> StudySetup:
        """Return the setup of the wrapped study."""
        return self._study.setup()

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """Return the proposal of the wrapped study."""
        return self._study.propose(trial)

    def observe(self, record: TrialRecord) -> None:
        """Count the trial and pass it on. A repeat shows no new speed-up."""
        self._num_trials += 1
        if record.speedup is not None and record.repeat_of is None and record.speedup > self._best:
            self._best, self._last_improvement = record.speedup, self._num_trials
        self._study.observe(record)

    def proposes_beside(self, pending: Sequence[Candidate]) -> bool:
        """Return the answer of the wrapped study while the limit of trials leaves room for another one."""
        return self._num_trials + len(pending) < self._max_trials and self._study.proposes_beside(pending)

    def finished(self) -> str | None:
        """Return the reason of the trial limit, the wrapped study, or patience, in this order."""
        # The trial limit first: a study may compute for long before it answers.
        if self._num_trials >= self._max_trials:
            return f"{self._num_trials} trials done"
        return self._study.finished() or self._idle()

    def expected(self) -> Mapping[str, float]:
        """Return the expected speed-ups of the wrapped study."""
        return self._study.expected()

    def remarks(self) -> list[str]:
        """Return the remarks of the wrapped study."""
        return self._study.remarks()

    def _idle(self) -> str | None:
        idle = self._num_trials - self._last_improvement
        if self._idle_limit is None or idle < self._idle_limit:
            return None
        return f"no better candidate in {idle} trials"
