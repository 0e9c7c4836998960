"""Optuna's samplers, seeded again for each trial, so that a resumed search continues as if never stopped."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial


class SeededByTrial(BaseSampler):
    """A sampler per trial, seeded by the trial's number.

    For samplers that keep nothing between trials but their random stream, such as TPE.
    """

    def __init__(self, seed: int, new: Callable[[int], BaseSampler]) -> None:
        self._seed, self._new = seed, new
        self._sampler = self._seeded(0)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Seed the sampler. Called by Optuna before each trial."""
        self._sampler = self._seeded(trial.number)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the parameters that are sampled together."""
        return self._sampler.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return values of these parameters."""
        return self._sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a value of one parameter by itself."""
        return self._sampler.sample_independent(study, trial, param_name, param_distribution)

    def _seeded(self, number: int) -> BaseSampler:
        return self._new(int(np.random.default_rng([self._seed, number]).integers(2**31)))


def tpe(seed: int, *, group: bool = False, num_random: int = 10) -> TPESampler:
    """Return multivariate TPE after `num_random` random trials.

    With `group`, parameters that only some trials have are sampled together with those that come with them.
    """
    with warnings.catch_warnings():
        # Both are marked experimental; a sampler that lost them would search worse, not wrongly.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(seed=seed, multivariate=True, group=group, n_startup_trials=num_random)
