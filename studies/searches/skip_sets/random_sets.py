"""Random search: the baseline of any search with the same number of measured sets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import optuna

from decoding.drafts import LayerSkip
from decoding.target import Target
from studies.contract import Problem
from studies.searches.skip_sets.contract import Method
from studies.searches.skip_sets.settings import SkipSetsSettings
from studies.switches import Switches


class RandomSets(Method):
    """Sets of exactly K_s = int(2(L-2) * ratio) sublayers of the middle blocks, all equally likely."""

    def __init__(self, problem: Problem, settings: SkipSetsSettings) -> None:
        super().__init__(problem, settings)
        self._switches = Switches.of_middle_blocks(problem.target.num_layers)

    @classmethod
    def check(cls, settings: SkipSetsSettings, target: Target) -> None:
        """Raise ValueError if K_s is 0."""
        check_ratio(settings.skip_ratio, target.num_layers)

    def propose(self, trial: optuna.Trial, num_trials: int) -> tuple[LayerSkip, dict[str, Any]]:
        """Return the set of this trial, from a stream of its own."""
        rng = np.random.default_rng([self.problem.seed, num_trials])
        point = self._switches.random(rng, self._switches.num_skipped(self.settings.skip_ratio))
        return self._switches.draft(point), {}


def check_ratio(ratio: float, num_layers: int) -> None:
    """Raise ValueError if `ratio` of the middle sublayers is less than one sublayer."""
    middle = Switches.of_middle_blocks(num_layers)
    if not middle.num_skipped(ratio):
        raise ValueError(
            f"skip_ratio {ratio:g} of the {len(middle)} sublayers between the first and the last block is none of them; "
            f"give at least {math.ceil(1000 / len(middle)) / 1000:g}"
        )
