"""The study of rival searches: one is chosen by name, and runs on the same trials, budget and draft-length rule as our own."""

from __future__ import annotations

from typing import Any, ClassVar

import optuna

from decoding.documents.strict_yaml import Document
from decoding.target import Target
from studies.contract import Candidate, Problem, Study, TrialRecord
from studies.searches.skip_sets.contract import Method
from studies.searches.skip_sets.draft_verify import DraftVerify
from studies.searches.skip_sets.odd_layers import OddLayers
from studies.searches.skip_sets.random_sets import RandomSets
from studies.searches.skip_sets.settings import MethodName, SkipSetsSettings
from studies.searches.skip_sets.swift import Swift
from studies.searches.skip_sets.tpe import Tpe

METHODS: dict[MethodName, type[Method]] = {
    "odd_layers": OddLayers,
    "random": RandomSets,
    "swift": Swift,
    "draft_verify": DraftVerify,
    "tpe": Tpe,
}


class SkipSets(Study):
    """One trial = one skip set measured. Which, the method says; when it is enough, the method, the trials or patience."""

    name: ClassVar[str] = "skip_sets"
    Settings: ClassVar[type[Document]] = SkipSetsSettings

    def __init__(self, problem: Problem, settings: SkipSetsSettings) -> None:
        self._settings = settings
        self._method = METHODS[settings.method](problem, settings)
        self._num_trials = 0
        self._best = 0.0
        self._last_improvement = 0

    @classmethod
    def create(cls, problem: Problem, settings: Any) -> SkipSets:
        """See `Study.create`."""
        return cls(problem, settings)

    @classmethod
    def check(cls, settings: Any, target: Target) -> None:
        """Raise ValueError for a model that has nothing, or no single sublayers, to leave out."""
        if target.num_layers < 3:
            raise ValueError(
                f"a model of {target.num_layers} layers has no block between the first and the last to leave out"
            )
        method = METHODS[settings.method]
        if not method.whole_blocks and None in (*target.anatomy.attention, *target.anatomy.mlp):
            raise ValueError(
                f"{settings.method} leaves out single sublayers, but this model has blocks without separate attention and "
                "MLP modules; odd_layers leaves out whole blocks"
            )
        method.check(settings, target)

    def sampler(self) -> optuna.samplers.BaseSampler:
        """The method's."""
        return self._method.sampler()

    def starts(self) -> list[dict[str, Any]]:
        """The method's."""
        return self._method.starts()

    def space(self) -> dict[str, Any]:
        """The method and its settings: with other limits it is the same search, going on longer."""
        limits: dict[str, Any] = {
            "max_trials": True,
            "patience": True,
            "swift": {"max_matchness", "tolerance", "max_candidates"},
        }
        return self._settings.model_dump(mode="json", exclude=limits)

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """The method's next set, its name among the notes."""
        draft, notes = self._method.propose(trial, self._num_trials)
        return Candidate(draft=draft, draft_length=self._settings.draft_length), {
            "method": self._settings.method,
            **notes,
        }

    def observe(self, record: TrialRecord) -> None:
        """Count trials since the last improvement, and tell the method."""
        self._num_trials += 1
        if record.speedup is not None and record.repeat_of is None and record.speedup > self._best:
            self._best, self._last_improvement = record.speedup, self._num_trials
        self._method.observe(record)

    def finished(self) -> str | None:
        """The method's own end, the trial limit, or `patience` trials without a better speed-up."""
        if (ended := self._method.finished()) is not None:
            return ended
        if self._num_trials >= self._settings.max_trials:
            return f"{self._num_trials} trials done"
        idle, patience = self._num_trials - self._last_improvement, self._settings.patience
        return f"no better skip set in {idle} trials" if patience is not None and idle >= patience else None
