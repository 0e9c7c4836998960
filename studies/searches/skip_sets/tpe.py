"""Optuna's own search: multivariate TPE over a switch per sublayer of the middle blocks, by the measured speed-up.

A general-purpose search without knowledge of language models. It starts from the odd blocks (our choice).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler

from decoding.drafts import LayerSkip
from studies.contract import Problem
from studies.samplers import SeededByTrial, tpe
from studies.searches.skip_sets.contract import Method
from studies.searches.skip_sets.settings import SkipSetsSettings
from studies.switches import Switches, odd_blocks


class Tpe(Method):
    """Multivariate TPE; Optuna keeps the state, in the trials. It counts running ones as slow ("constant liar")."""

    proposes_beside = True

    def __init__(self, problem: Problem, settings: SkipSetsSettings) -> None:
        super().__init__(problem, settings)
        self._switches = Switches.of_middle_blocks(problem.target.num_layers)

    def sampler(self) -> BaseSampler:
        """Return TPE, seeded again for each trial."""
        return SeededByTrial(self.problem.seed, tpe)

    def starts(self) -> list[dict[str, Any]]:
        """Return the odd blocks."""
        odd = self._switches.point(odd_blocks(self.problem.target.num_layers))
        return [dict(zip(self._switches.names, (odd > 0.5).tolist(), strict=True))]

    def propose(self, trial: optuna.Trial, num_trials: int) -> tuple[LayerSkip, dict[str, Any]]:
        """Return the set that Optuna suggests, switch by switch."""
        suggested = [trial.suggest_categorical(name, [False, True]) for name in self._switches.names]
        return self._switches.draft(np.array(suggested, dtype=float)), {}
