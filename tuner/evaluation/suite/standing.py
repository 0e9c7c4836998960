"""All results of one model in one precision: speed-ups by task and overall, and what each method prepared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from decoding.profile import Interval
from studies.ratios import Ratio, geometric_mean
from tuner.bench.contenders import PLAIN
from tuner.evaluation.suite.bench_cell import TUNED_ON, BenchCell
from tuner.evaluation.suite.contract import Place
from tuner.evaluation.suite.figures import speed_ratio
from tuner.evaluation.suite.result import BenchFound, SearchFound
from tuner.measuring.comparison import Phase

EQUAL = Ratio(1.0, 0.0, 1.0)
"""Plain decoding over plain decoding."""


@dataclass(frozen=True)
class Standing:
    """The comparisons of one model in one precision that have a result."""

    place: Place
    model: str
    precision: str

    @cached_property
    def benches(self) -> dict[str, BenchFound]:
        """Comparisons by task, in the order of the suite."""
        cells = {task: BenchCell(self.place, self.model, self.precision, task) for task in self.place.suite.tasks}
        found = {task: cell.found() for task, cell in cells.items()}
        return {task: bench for task, bench in found.items() if bench is not None}

    @cached_property
    def searches(self) -> dict[tuple[str, str], SearchFound | None]:
        """Searches by task and method; None for one without a result."""
        cells = {task: BenchCell(self.place, self.model, self.precision, task) for task in self.place.suite.tasks}
        return {
            (task, method): cell.searches()[method].found()
            for task, cell in cells.items()
            for method in self.place.suite.methods
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Contenders of the table, plain decoding first; drafts from other tasks are in tables of their own."""
        bench = BenchCell(self.place, self.model, self.precision, next(iter(self.place.suite.tasks)))
        return tuple(dict.fromkeys((PLAIN, *bench.baselines, *self.place.suite.methods)))

    def keeps_plain(self, task: str, name: str) -> bool:
        """Return True for a method whose search on `task` decided for plain decoding."""
        found = self.searches.get((task, name))
        return found is not None and not found.claims_speedup

    def speedup(self, task: str, name: str, phase: Phase, reference: str = PLAIN) -> Interval | None:
        """Return the speed-up of a contender over another one on a task, or None if one of them has no figures."""
        found = self._ratio(task, name, phase, reference)
        return None if found is None else found.interval()

    def overall(self, name: str, phase: Phase, reference: str = PLAIN) -> tuple[Interval, int] | None:
        """Return the geometric mean over the tasks that have figures, and their number; None if no task has."""
        found = [self._ratio(task, name, phase, reference) for task in self.benches]
        return _mean([each for each in found if each is not None])

    def deployed(self, name: str) -> tuple[Interval, int] | None:
        """Return the decode speed-up over all tasks if each is decoded as its search decided: plainly where it said so."""
        found = []
        for task in self.benches:
            measured = self._ratio(task, name, Phase.DECODE, PLAIN)
            is_plain = self.keeps_plain(task, name)
            found.append(EQUAL if is_plain else measured)
        return _mean([each for each in found if each is not None])

    def moved(self, method: str, tuned_on: str, task: str) -> Interval | None:
        """Return the decode speed-up on `task` of the draft that `method` found on another task, or on this one."""
        return self.speedup(task, method if tuned_on == task else f"{method}{TUNED_ON}{tuned_on}", Phase.DECODE)

    def moved_overall(self, method: str, tuned_on: str) -> tuple[Interval, int] | None:
        """Return the geometric mean of `moved` over the tasks other than the one it was tuned on."""
        name = f"{method}{TUNED_ON}{tuned_on}"
        found = [self._ratio(task, name, Phase.DECODE, PLAIN) for task in self.benches if task != tuned_on]
        return _mean([each for each in found if each is not None])

    def best(self, task: str) -> tuple[str, Interval] | None:
        """Return the contender with the highest decode speed-up on a task, plain decoding aside; None if there is none."""
        found = {name: self.speedup(task, name, Phase.DECODE) for name in self.names if not name.startswith(PLAIN)}
        known = {name: interval for name, interval in found.items() if interval is not None}
        name = max(known, key=lambda each: known[each].value, default=None)
        return None if name is None else (name, known[name])

    def _ratio(self, task: str, name: str, phase: Phase, reference: str) -> Ratio | None:
        return speed_ratio(self.benches[task], name, phase, reference) if task in self.benches else None


def _mean(found: Sequence[Ratio]) -> tuple[Interval, int] | None:
    return (geometric_mean(found), len(found)) if found else None
