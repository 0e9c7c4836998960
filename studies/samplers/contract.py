"""The contract of a study: an Optuna sampler, and what a search asks it beside parameters.

A study chooses what to try next and learns from the stored trials. It never measures or prints: `tuner.search.objective` turns the
parameters into a candidate, measures it by real decoding and stores the record, in an attribute of the trial.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import BaseTrial, FrozenTrial
from optuna.trial import TrialState as OptunaState

from studies.contract import Candidate, Problem, StudySettings, TrialRecord
from studies.space import Parameters

RECORD = "record"
"""Attribute of a trial that has ended: its record."""
BEGUN = "begun"
"""Attribute of a trial: the candidate that is measured, for other processes."""


class CandidateSpace(Protocol):
    """The candidates of a study as Optuna parameters, fixed by model and settings: Optuna refuses values that change."""

    def suggest(self, trial: BaseTrial) -> Candidate:
        """Return the candidate that the trial suggests, part by part."""

    def identity(self) -> dict[str, Any]:
        """Return what two searches of one space have in common, as plain data."""


class StudySampler(optuna.samplers.BaseSampler):
    """A sampler that chooses a candidate for each trial, and gives its parameters one by one as they are suggested.

    What must survive a restart is in the attributes of the Optuna study, or recomputed from the stored trials.
    """

    name: str
    """The key in `studies.samplers.SAMPLERS`."""
    Settings: ClassVar[type[StudySettings]] = StudySettings
    follows: ClassVar[bool] = False
    """True if a candidate follows from the trial before: trials then run one after another, also in several processes."""
    space: CandidateSpace

    def __init__(self, problem: Problem, settings: Any) -> None:
        """Make the space. Raises ValueError for settings that the problem does not allow; surveys nothing yet."""
        self.problem, self.settings = problem, settings
        self._chosen: Parameters | None = None
        self._learned: set[int] = set()

    def identity(self) -> dict[str, Any]:
        """Return what makes two runs the same search, as plain data: stored, and compared on resume."""
        return {**self.settings.identity(), **self.space.identity()}

    def begin(self, study: optuna.Study) -> None:
        """Survey what takes long, and enqueue what a new study tries first; called once, before trials.

        Raises ValueError if the problem lacks something that the study needs.
        """

    def choose(self, study: optuna.Study, trial: FrozenTrial) -> Parameters:
        """Return the parameters of the next candidate. Called at the first suggestion, when the trial gives signs of life."""
        raise NotImplementedError(f"{type(self).__name__} chooses nothing")

    def observe(self, record: TrialRecord) -> None:
        """Learn how a trial ended. Called once for each stored trial, by number."""

    def notes(self, candidate: Candidate) -> dict[str, Any]:
        """Return notes to keep with the record of a trial of this candidate, which may have been enqueued."""
        return {}

    def finished(self, study: optuna.Study) -> str | None:
        """Learn, and return the reason that nothing is left to try, or None. `tuner.search.objective` applies the limits."""
        self.learn(study)
        return None

    def expected(self) -> Mapping[str, float]:
        """Return expected speed-ups by candidate key, where the study knows more than a trial's few prompts show."""
        return {}

    def remarks(self) -> list[str]:
        """Return what a user should know about the result, once the study has ended."""
        return []

    def learn(self, study: optuna.Study) -> None:
        """Observe the trials of all processes that have ended since the last call."""
        for trial in study.get_trials(deepcopy=False):
            if trial.number not in self._learned and (stored := trial.user_attrs.get(RECORD)) is not None:
                self._learned.add(trial.number)
                self.observe(TrialRecord.model_validate_json(stored))

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Forget the choice of the trial before. Called by Optuna, outside of the trial's signs of life: nothing else is done."""
        self._chosen = None

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return no parameters: none is sampled without being asked for."""
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return no values."""
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return the chosen value."""
        if self._chosen is None:
            self.learn(study)
            self._chosen = self.choose(study, trial)
        return self._chosen[param_name]


def enqueue_in_new(study: optuna.Study, starts: Iterable[Mapping[str, Any]]) -> None:
    """Enqueue these parameters, each once, in a study without trials."""
    if study.get_trials(deepcopy=False):
        return
    enqueued: list[Mapping[str, Any]] = []
    for start in starts:
        if start not in enqueued:
            enqueued.append(start)
            study.enqueue_trial(dict(start))


def measured_now(study: optuna.Study, before: int | None = None) -> list[Candidate | None]:
    """Return what is measured in trials that run, those with a number below `before`; None for what is still being chosen."""
    running = study.get_trials(deepcopy=False, states=(OptunaState.RUNNING,))
    texts = [
        trial.user_attrs.get(BEGUN)
        for trial in running
        if RECORD not in trial.user_attrs and (before is None or trial.number < before)
    ]
    return [None if text is None else Candidate.model_validate_json(text) for text in texts]
