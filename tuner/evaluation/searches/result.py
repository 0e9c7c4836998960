"""What a comparison of searches found: its runs and the held-out samples, and all that follows from them. Measures nothing."""

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
    """When the reference had reached what a rival ended with, on the mean curves over seeds, in seconds or tokens."""

    at: float | None
    """None: not within its budget."""
    rival_spent: float
    """Mean over seeds of what the rival spent."""

    @property
    def share(self) -> float | None:
        """`at` as a share of what the rival spent; None if that is nothing."""
        return None if self.at is None or not self.rival_spent else self.at / self.rival_spent


@dataclass(frozen=True)
class SearchComparison:
    """The runs of each search, one a seed, and what their incumbents do on held-out prompts."""

    runs: Mapping[str, tuple[SearchRun, ...]]
    limits: Limits
    held_out: Mapping[str, Measurement]
    """The measurement of each incumbent, by its candidate's key."""
    num_held_out: int
    facts: Mapping[str, Any]

    @property
    def searches(self) -> tuple[str, ...]:
        """In the order they were asked for."""
        return tuple(self.runs)

    @property
    def reference(self) -> str:
        """The search that all are compared with: `joint` if it is among them, else the first."""
        return next((name for name in DEFAULT_STUDIES if name in self.runs), self.searches[0])

    def counted(self, run: SearchRun) -> list[CurvePoint]:
        """The trials of a run that count."""
        return run.within(self.limits)

    def final(self, run: SearchRun) -> TrialRecord | None:
        """What a run ended with; None for plain decoding."""
        counted = self.counted(run)
        return counted[-1].incumbent if counted else None

    def measured(self, incumbent: TrialRecord | None) -> Measurement | None:
        """The held-out samples of an incumbent; None for plain decoding."""
        return None if incumbent is None else self.held_out[incumbent.candidate.key]

    def in_force(self, incumbent: TrialRecord | None) -> Measurement | None:
        """The same, and None too for an incumbent that writes another text than plain decoding there: it may not be used."""
        measured = self.measured(incumbent)
        return measured if measured is not None and measured.is_lossless else None

    def held_out_speedup(self, incumbent: TrialRecord | None) -> float:
        """Of an incumbent, 1 for plain decoding."""
        measured = self.in_force(incumbent)
        return 1.0 if measured is None else measured.speedup

    def curve(self, run: SearchRun, axis: Axis) -> Curve:
        """The held-out speed-up of the best so far against what was spent."""
        return tuple((float(getattr(p, axis)), self.held_out_speedup(p.incumbent)) for p in self.counted(run))

    def mean_curve(self, search: str, axis: Axis) -> Curve:
        """The mean of the seeds' curves."""
        return mean_curve([self.curve(run, axis) for run in self.runs[search]])

    def spent(self, search: str, axis: Axis) -> float:
        """What a search spent, the mean over seeds."""
        place = 0 if axis == "seconds" else 1
        return float(np.mean([run.spent(self.limits)[place] for run in self.runs[search]]))

    def num_trials(self, search: str) -> float:
        """Trials that count, the mean over seeds."""
        return float(np.mean([len(self.counted(run)) for run in self.runs[search]]))

    def finals(self, search: str) -> Finals:
        """What a search ended with, with each seed."""
        return Finals.of([self.in_force(self.final(run)) for run in self.runs[search]], self.num_held_out)

    def speedup(self, search: str) -> Interval:
        """On held-out prompts at the end of the budget, over seeds and prompts."""
        return speedup_interval(self.finals(search))

    def over_reference(self, search: str) -> Interval:
        """How many times the reference's speed-up a search's is, on the same prompts and seeds."""
        return quotient_interval(self.finals(search), self.finals(self.reference))

    def reach(self, rival: str, axis: Axis) -> Reach:
        """When the reference had reached what `rival` ended with."""
        value = float(self.finals(rival).speedups().mean())
        return Reach(reached_at(self.mean_curve(self.reference, axis), value), self.spent(rival, axis))

    def identical(self, search: str) -> tuple[int, int]:
        """Held-out texts of what a search ended with that are plain decoding's, token by token, and all of them."""
        finals = [self.measured(self.final(run)) for run in self.runs[search]]
        same = sum(self.num_held_out if each is None else each.num_identical for each in finals)
        return same, self.num_held_out * len(finals)
