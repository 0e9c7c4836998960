"""Every other block, without a search: the start of SWIFT and ConfLayers, and the baseline of any search."""

from __future__ import annotations

from typing import Any

import optuna

from decoding.drafts import LayerSkip
from studies.contract import TrialRecord
from studies.searches.skip_sets.contract import Method
from studies.switches import odd_blocks


class OddLayers(Method):
    """A single trial."""

    whole_blocks = True
    _done = False

    def propose(self, trial: optuna.Trial, num_trials: int) -> tuple[LayerSkip, dict[str, Any]]:
        """Return blocks 1, 3, 5 ..."""
        return odd_blocks(self.problem.target.num_layers), {}

    def observe(self, record: TrialRecord) -> None:
        """Note that the only trial is done."""
        self._done = True

    def finished(self) -> str | None:
        """Return a reason after the only trial."""
        return "the odd blocks are measured" if self._done else None
