"""Optuna's samplers by name, seeded again for each trial, so that a resumed search continues as if never stopped."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakMethod

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

PREFIX = "optuna:"
"""What the name of a study begins with that is a class of `optuna.samplers`."""


class SeededByTrial(BaseSampler):
    """A sampler per trial, seeded by the trial's number: for samplers that keep what they know in the storage, as Optuna's do."""

    def __init__(self, seed: int, new: Callable[[int], BaseSampler]) -> None:
        self._seed, self._new = seed, new
        self._sampler = self._seeded(0)
        self.num_together = self.num_alone = 0
        """Parameters that were sampled together with others, and by themselves."""

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
        self.num_together += len(found)
        return found

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a value of one parameter by itself."""
        self.num_alone += 1
        return self._sampler.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Let the sampler store what it has learned. Called by Optuna after each trial."""
        self._sampler.after_trial(study, trial, state, values)

    def _seeded(self, number: int) -> BaseSampler:
        return self._new(int(np.random.default_rng([self._seed, number]).integers(2**31)))


class Chosen(BaseSampler):
    """Gives a trial the parameters that its study has chosen, one by one as they are suggested."""

    def __init__(self, choose: Callable[[], Mapping[str, Any]]) -> None:
        # Weak: the stored study keeps its sampler, and must not keep surveys, which are as large as the model's weights.
        self._choose = WeakMethod(choose)
        self._parameters: Mapping[str, Any] | None = None

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Forget the choice of the trial before. Called by Optuna before each trial."""
        self._parameters = None

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return no parameters: none is sampled."""
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
        if self._parameters is None:
            choose = self._choose()
            assert choose is not None, "trials are asked for while the search runs"
            self._parameters = choose()
        return self._parameters[param_name]


def tpe(seed: int, *, group: bool = False, num_random: int = 10) -> TPESampler:
    """Return multivariate TPE after `num_random` random trials.

    With `group`, parameters that only some trials have are sampled together with those that come with them.
    """
    with warnings.catch_warnings():
        # Both are marked experimental; a sampler that lost them would search worse, not wrongly.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(seed=seed, multivariate=True, group=group, n_startup_trials=num_random)


def sampler_names() -> list[str]:
    """Return the names of Optuna's samplers that a seed is enough to make."""
    return [name for name in optuna.samplers.__all__ if _reason_against(name) is None]


def named_sampler(name: str) -> Callable[[int], BaseSampler]:
    """Return what makes the sampler of this name from a seed.

    Raises ValueError for a name that Optuna does not have, and for a sampler that needs more than a seed, or a missing package.
    """
    if (reason := _reason_against(name)) is not None:
        raise ValueError(f"{PREFIX}{name}: {reason}; valid: {', '.join(sampler_names())}")
    return lambda seed: _new(name, seed)


def _reason_against(name: str) -> str | None:
    if name not in optuna.samplers.__all__ or not inspect.isclass(getattr(optuna.samplers, name)):
        return "Optuna has no such sampler"
    try:
        _new(name, 0)
    except TypeError:
        return "it needs more than a seed"
    except ImportError as cause:
        return str(cause).splitlines()[0]
    return None


def _new(name: str, seed: int) -> BaseSampler:
    made = getattr(optuna.samplers, name)
    # Its warnings about parameters that only some trials have; `studies.searches.by_sampler` says so once.
    asked = inspect.signature(made).parameters.get("warn_independent_sampling")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler: BaseSampler = made(
            seed=seed, **({"warn_independent_sampling": False} if asked and asked.default else {})
        )
    return sampler
