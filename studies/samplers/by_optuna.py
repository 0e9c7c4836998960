"""Optuna's samplers as studies: over the whole space by the measured speed-up (`tpe`, `random`, `optuna:NAME`), or within ours.

Each is seeded again for each trial, so that a resumed search continues as if never stopped.
"""

from __future__ import annotations

import inspect
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState
from pydantic import Field

from studies.contract import Problem, TrialRecord
from studies.samplers import OPTUNA
from studies.samplers.contract import StudySampler, enqueue_in_new
from studies.space import Space, SpaceSettings

NUM_TRIED = 3
"""Trials of nothing that show whether a sampler can suggest from the space: some need a trial before they sample themselves."""


class ByOptuna(StudySampler):
    """A study whose parameters one of Optuna's samplers chooses, which keeps what it knows in the storage."""

    def __init__(self, problem: Problem, settings: Any) -> None:
        super().__init__(problem, settings)
        self._sampler = self._seeded(0)
        self._num_together = self._num_alone = 0

    @abstractmethod
    def new_sampler(self, seed: int) -> BaseSampler:
        """Return Optuna's sampler with a seed."""

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Seed the sampler. Called by Optuna before each trial."""
        self._sampler = self._seeded(trial.number)
        self._sampler.before_trial(study, trial)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the parameters that are sampled together."""
        return self._sampler.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return values of parameters that are sampled together."""
        found = self._sampler.sample_relative(study, trial, search_space)
        self._num_together += len(found)
        return found

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a value of one parameter by itself."""
        self._num_alone += 1
        return self._sampler.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Let the sampler store what it has learned. Called by Optuna after each trial."""
        self._sampler.after_trial(study, trial, state, values)

    def _seeded(self, number: int) -> BaseSampler:
        return self.new_sampler(int(np.random.default_rng([self.problem.seed, number]).integers(2**31)))


class WholeSpaceSettings(SpaceSettings):
    """Settings of a search by one of Optuna's samplers."""

    max_trials: int = Field(200, ge=1, description="trials at most")
    patience: int | None = Field(
        None, ge=1, description="trials without a better speed-up after which the search ends; default: none"
    )


class WholeSpace(ByOptuna):
    """Any draft with any rule. It predicts nothing and asks for no costs.

    It begins with known candidates and usual drafts of each kind (our choice).
    """

    Settings = WholeSpaceSettings
    space: Space

    def __init__(self, problem: Problem, settings: WholeSpaceSettings) -> None:
        super().__init__(problem, settings)
        self.space = settings.space(problem)
        self._known = [self.space.parameters(candidate) for candidate in settings.candidates]
        self._check()

    def begin(self, study: optuna.Study) -> None:
        """Enqueue known candidates, then usual drafts with the defaults of the first rule."""
        enqueue_in_new(study, [*self._known, *self.space.starts()])

    def remarks(self) -> list[str]:
        """Return a remark if one of Optuna's samplers did not model most parameters together: many are not in every trial."""
        alone, together = self._num_alone, self._num_together
        if not self.name.startswith(OPTUNA) or alone <= together:
            return []
        return [f"{self.name} sampled {alone} of {alone + together} parameters one by one: not every trial has them"]

    def _check(self) -> None:
        """Raise ValueError, with the reason, if the sampler cannot suggest from the space."""
        tried = optuna.create_study(sampler=self.new_sampler(self.problem.seed))
        try:
            for _ in range(NUM_TRIED):
                trial = tried.ask()
                self.space.suggest(trial)
                tried.tell(trial, 1.0)
        except Exception as cause:  # any of Optuna's samplers, each with errors of its own
            reason = str(cause).splitlines()[0]
            raise ValueError(f"study {self.name}: this sampler cannot search drafts and rules: {reason}") from cause


class TpeSearch(WholeSpace):
    """Multivariate TPE, which samples the parameters of each kind and rule together."""

    name = "tpe"

    def new_sampler(self, seed: int) -> BaseSampler:
        """Return TPE that treats the parameters of each kind and rule as one group."""
        return tpe(seed)


class RandomSearch(WholeSpace):
    """Random search."""

    name = "random"

    def new_sampler(self, seed: int) -> BaseSampler:
        """Return random sampling."""
        return RandomSampler(seed=seed)


class TpeOfRules(ByOptuna):
    """A study by TPE that treats the parameters of each rule as one group, and remembers its best trial."""

    best: TrialRecord | None = None

    def observe(self, record: TrialRecord) -> None:
        """Remember the best trial; the sampler decides what to try next."""
        best = self.best.speedup if self.best is not None else None
        if record.speedup is not None and record.repeat_of is None and record.speedup > (best or 0.0):
            self.best = record

    def new_sampler(self, seed: int) -> BaseSampler:
        """Return TPE after few random trials, as the starts are not random."""
        return tpe(seed, num_random=8)


def tpe(seed: int, *, num_random: int = 10) -> TPESampler:
    """Return multivariate TPE after `num_random` random trials.

    Parameters that only some trials have are sampled together with those that come with them.
    """
    with warnings.catch_warnings():
        # Both are marked experimental; a sampler that lost them would search worse, not wrongly.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=num_random)


def named(study: str) -> type[WholeSpace]:
    """Return the study of a sampler's name, such as `optuna:GPSampler`.

    Raises ValueError for a name that Optuna does not have, and for a sampler that needs more than a seed, or a missing package.
    """
    name = study.removeprefix(OPTUNA)
    if (reason := _reason_against(name)) is not None:
        raise ValueError(f"{study}: {reason}; valid: {', '.join(sampler_names())}")
    return type(study, (WholeSpace,), {"name": study, "new_sampler": lambda self, seed: _new(name, seed)})


def sampler_names() -> list[str]:
    """Return the names of Optuna's samplers that a seed is enough to make."""
    return [name for name in optuna.samplers.__all__ if _reason_against(name) is None]


def _reason_against(name: str) -> str | None:
    if name not in optuna.samplers.__all__ or not inspect.isclass(getattr(optuna.samplers, name)):
        return "Optuna has no such sampler"
    if name == "CmaEsSampler" and find_spec("cmaes") is None:  # which it imports when it first samples
        return "it needs a package: pip install cmaes"
    try:
        _new(name, 0)
    except TypeError:
        return "it needs more than a seed"
    except ImportError as cause:
        return str(cause).splitlines()[0]
    return None


def _new(name: str, seed: int) -> BaseSampler:
    made = getattr(optuna.samplers, name)
    # Its warnings about parameters that only some trials have; `WholeSpace.remarks` says so once.
    asked = inspect.signature(made).parameters.get("warn_independent_sampling")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler: BaseSampler = made(
            seed=seed, **({"warn_independent_sampling": False} if asked and asked.default else {})
        )
    return sampler
