"""Optuna's own search: multivariate TPE over a switch per sublayer of the middle blocks, by the measured speed-up.

A general-purpose search without knowledge of language models. It starts from the odd blocks (our choice).
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial

from decoding.drafts import LayerSkip
from studies.contract import Problem
from studies.searches.skip_sets.contract import Method
from studies.searches.skip_sets.settings import SkipSetsSettings
from studies.searches.skip_sets.switches import Switches, odd_blocks


class Tpe(Method):
    """Multivariate TPE; Optuna keeps the state, in the finished trials."""

    def __init__(self, problem: Problem, settings: SkipSetsSettings) -> None:
        super().__init__(problem, settings)
        self._switches = Switches.of_middle_blocks(problem.target.num_layers)

    def sampler(self) -> BaseSampler:
        """Return TPE, seeded again for each trial."""
        return SeededByTrial(self.problem.seed)

    def starts(self) -> list[dict[str, Any]]:
        """Return the odd blocks."""
        odd = self._switches.point(odd_blocks(self.problem.target.num_layers))
        return [dict(zip(self._switches.names, (odd > 0.5).tolist(), strict=True))]

    def propose(self, trial: optuna.Trial, num_trials: int) -> tuple[LayerSkip, dict[str, Any]]:
        """Return the set that Optuna suggests, switch by switch."""
        suggested = [trial.suggest_categorical(name, [False, True]) for name in self._switches.names]
        return self._switches.draft(np.array(suggested, dtype=float)), {}


class SeededByTrial(BaseSampler):
    """A TPE sampler per trial, seeded by the trial's number, so that a resumed search continues as if never stopped.

    TPE keeps nothing between trials but its random stream.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._tpe = self._seeded(0)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Seed the sampler. Called by Optuna before each trial."""
        self._tpe = self._seeded(trial.number)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the switches."""
        return self._tpe.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return values of all switches together."""
        return self._tpe.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a random value of one switch, while there are too few trials for TPE."""
        return self._tpe.sample_independent(study, trial, param_name, param_distribution)

    def _seeded(self, number: int) -> TPESampler:
        seed = int(np.random.default_rng([self._seed, number]).integers(2**31))
        with warnings.catch_warnings():
            # `multivariate` is marked experimental; a sampler that lost it would search worse, not wrongly.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return TPESampler(seed=seed, multivariate=True)
