"""Draft & Verify's search (arXiv 2309.08168): Bayesian optimisation of the measured speed over a switch for each sublayer.

As in the released code: 2L switches, including the first and the last block; a sublayer is skipped if the point's coordinate
is above one half; the process is told the point and its measured speed; kappa is 2.576, the default of the package; no random
points at the start; drafts of at most 8 tokens end by the adaptive exit, whose threshold starts at 0.8. Every iteration is a trial
here, so the budget is the search's (theirs: 1000 iterations of 8 prompts of 32 tokens).

Our choices: the value is the speed-up over plain decoding of the same prompts, as the speed itself drifts with the machine;
the search starts from the odd blocks, where the authors give two sets of their own for a model of 40 layers; a pruned trial
counts with the prompts it measured, a failed one as the slowest known; a repeated set takes over its measurement.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna

from decoding.draft_length import AdaptiveExit
from decoding.drafts import LayerSkip
from studies.contract import Problem, TrialRecord, TrialState
from studies.searches.skip_sets.bayes import suggest_point
from studies.searches.skip_sets.contract import Method
from studies.searches.skip_sets.settings import SkipSetsSettings
from studies.switches import SkipPoint, Switches, odd_blocks

KAPPA = 2.576


class DraftVerify(Method):
    """State: the points tried and their speed-ups."""

    draft_length = AdaptiveExit(max_tokens=8, initial_threshold=0.8)

    def __init__(self, problem: Problem, settings: SkipSetsSettings) -> None:
        super().__init__(problem, settings)
        self._switches = Switches.of_all_blocks(problem.target.num_layers)
        self._points: list[SkipPoint] = []
        self._values: list[float | None] = []

    def propose(self, trial: optuna.Trial, num_trials: int) -> tuple[LayerSkip, dict[str, Any]]:
        """Return the odd blocks, then the point with the highest upper bound; the notes hold the point."""
        point = self._start() if num_trials == 0 else self._suggest(num_trials)
        return self._switches.draft(point), {"point": point.tolist()}

    def observe(self, record: TrialRecord) -> None:
        """Add the point and its speed-up; a failed trial has no value of its own."""
        measured = record.measurement if record.state is not TrialState.FAIL else None
        self._points.append(np.array(record.notes["point"]))
        self._values.append(measured.speedup if measured else None)

    def _start(self) -> SkipPoint:
        return self._switches.point(odd_blocks(self.problem.target.num_layers))

    def _suggest(self, num_trials: int) -> SkipPoint:
        known = [value for value in self._values if value is not None]
        values = [min(known) if value is None else value for value in self._values] if known else []
        return suggest_point(
            self._points[: len(values)],
            values,
            size=len(self._switches),
            kappa=KAPPA,
            rng=np.random.default_rng([self.problem.seed, num_trials]),
        )
