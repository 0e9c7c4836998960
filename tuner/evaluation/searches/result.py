"""Result of a comparison of searches: runs, held-out samples, and figures derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from decoding.profile import Interval
from studies.contract import TrialRecord
from studies.measurement import Measurement
from studies.searches.registry import DEFAULT_STUDIES
from tuner.evaluation.searches.curves import (
    Curve,
    Finals,
    mean_curve,
    quotient_interval,
    reached_at,
    speedup_interval,
)
from tuner.evaluation.searches.runs import CurvePoint, Limits, SearchRun

Axis = Literal["seconds", "tokens"]


@dataclass(frozen=True)
class Reach:
    """Seconds or tokens after which the reference's mean curve reached a rival's final speed-up."""

    at: float | None
    """None if it was not reached within the budget."""
    rival_spent: float
    """Seconds or tokens that the rival spent, mean over seeds."""

    @property
    def share(self) -> float | None:
        """Ratio of `at` to the rival's spending; None if either is missing."""
        return None if self.at is None or not self.rival_spent else self.at / self.rival_spent


@dataclass(frozen=True)
class SearchComparison:
    """Runs of each search, one per seed, with the held-out measurements of their incumbents."""

    runs: Mapping[str, tuple[SearchRun, ...]]
    limits: Limits
    held_out: Mapping[str, Measurement]
    """Measurement of each incumbent, by its candidate's key."""
    num_held_out: int
    facts: Mapping[str, Any]

    @property
    def searches(self) -> tuple[str, ...]:
        """Names of the searches in the requested order."""
        return tuple(self.runs)

    @property
    def reference(self) -> str:
        """Reference of the comparison: the first default study present, otherwise the first search."""
        return next((name for name in DEFAULT_STUDIES if name in self.runs), self.searches[0])

    def counted(self, run: SearchRun) -> list[CurvePoint]:
        """Return the trials of a run that ended within the budget."""
        return run.within(self.limits)

    def final(self, run: SearchRun) -> TrialRecord | None:
        """Return the final incumbent of a run; None for plain decoding."""
        counted = self.counted(run)
        return counted[-1].incumbent if counted else None

    def measured(self, incumbent: TrialRecord | None) -> Measurement | None:
        """Return the held-out samples of an incumbent; None for plain decoding."""
        return None if incumbent is None else self.held_out[incumbent.candidate.key]

    def usable(self, incumbent: TrialRecord | None) -> Measurement | None:
        """Return the held-out samples of a lossless incumbent; None for others and plain decoding."""
        measured = self.measured(incumbent)
        return measured if measured is not None and measured.is_lossless else None

    def held_out_speedup(self, incumbent: TrialRecord | None) -> float:
        """Return the held-out speed-up of an incumbent; 1 for plain decoding."""
        measured = self.usable(incumbent)
        return 1.0 if measured is None else measured.speedup

    def curve(self, run: SearchRun, axis: Axis) -> Curve:
        """Return the held-out speed-up of the best so far against the budget spent."""
        return tuple((float(getattr(p, axis)), self.held_out_speedup(p.incumbent)) for p in self.counted(run))

    def mean_curve(self, search: str, axis: Axis) -> Curve:
        """Return the mean curve of a search over its seeds."""
        return mean_curve([self.curve(run, axis) for run in self.runs[search]])

    def spent(self, search: str, axis: Axis) -> float:
        """Return the seconds or tokens that a search spent, mean over seeds."""
        index = 0 if axis == "seconds" else 1
        return float(np.mean([run.spent(self.limits)[index] for run in self.runs[search]]))

    def num_trials(self, search: str) -> float:
        """Return the number of trials within the budget, mean over seeds."""
        return float(np.mean([len(self.counted(run)) for run in self.runs[search]]))

    def finals(self, search: str) -> Finals:
        """Return the final incumbents' seconds per token."""
        return Finals.of([self.usable(self.final(run)) for run in self.runs[search]], self.num_held_out)

    def speedup(self, search: str) -> Interval:
        """Return the held-out speed-up at the end of the budget, with its interval."""
        return speedup_interval(self.finals(search))

    def over_reference(self, search: str) -> Interval:
        """Return the quotient of a search's speed-up and the reference's, with its interval."""
        return quotient_interval(self.finals(search), self.finals(self.reference))

    def reach(self, rival: str, axis: Axis) -> Reach:
        """Return when the reference reached the final speed-up of `rival`."""
        value = float(self.finals(rival).speedups().mean())
        return Reach(reached_at(self.mean_curve(self.reference, axis), value), self.spent(rival, axis))

    def identical(self, search: str) -> tuple[int, int]:
        """Return the number of held-out outputs equal to plain decoding, and the total number."""
        finals = [self.measured(self.final(run)) for run in self.runs[search]]
        same = sum(self.num_held_out if each is None else each.num_identical for each in finals)
        return same, self.num_held_out * len(finals)
