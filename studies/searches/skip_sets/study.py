"""The study of published skip-set searches: one method, chosen by name, on the same trials as ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optuna

from studies.contract import Candidate, Problem, Study, StudySetup, TrialRecord
from studies.searches.skip_sets.methods import load_method
from studies.searches.skip_sets.settings import SkipSetsSettings


class SkipSets(Study):
    """One trial per skip set. The method proposes the sets and may end the search."""

    name = "skip_sets"
    Settings = SkipSetsSettings

    def __init__(self, problem: Problem, settings: SkipSetsSettings) -> None:
        super().__init__(problem, settings)
        self._method = load_method(settings.method)(problem, settings)
        self._rule = settings.draft_length or self._method.draft_length
        self._num_trials = 0

    def setup(self) -> StudySetup:
        """Return the setup with the method's sampler and starts."""
        return StudySetup(self.settings.identity(), self._method.sampler(), self._method.starts())

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """Return the method's next set; its name is among the notes."""
        draft, notes = self._method.propose(trial, self._num_trials)
        candidate = Candidate(draft=draft, draft_length=self._rule)
        return candidate, {"method": self.settings.method, **notes}

    def observe(self, record: TrialRecord) -> None:
        """Count the trial and tell the method."""
        self._num_trials += 1
        self._method.observe(record)

    def proposes_beside(self, pending: Sequence[Candidate]) -> bool:
        """Return whether the method can choose a set before the running trials have ended."""
        return self._method.proposes_beside

    def finished(self) -> str | None:
        """Return the method's own reason to end."""
        return self._method.finished()
