"""Keeps one search within its time: how many prompts it decodes, when its trials end, how far race and confirmation go.

Every stage is planned again from what the earlier ones have shown. Without a timeout nothing is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from studies.contract import TrialRecord
from studies.measurement import Measurement
from tuner.inputs.prompts import Prompt
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.search.decision import Confirmed
from tuner.search.forecast import Forecast, rate_of
from tuner.search.race import Finalist
from tuner.search.task import Task
from tuner.search.time_budget import Pace, Reserve, enough
from tuner.search.time_plan import (
    END_SHARE,
    LEAST_HELD_OUT,
    EndPlan,
    least_end,
    plan_end,
    plan_lines,
    stock_samples,
    trial_seconds,
)
from tuner.stage_clock import Stage, spoken

SHORTEST = "the shortest search with a result (one trial)"
SLOWEST = 0.25
"""Speed-up below which a candidate of the race is not expected to lie."""


class TimeKeeper:
    """The time of one search, from the forecast on."""

    def __init__(self, task: Task, found: Forecast) -> None:
        self._task, self._budget = task, task.budget
        self._sizes, self._rate = found.sizes, found.rate
        self._unit = "prompts" if task.config.batch_size == 1 else "batches"
        self.plan = found.plan(self._budget.left)
        """What is to come, as planned at the beginning."""
        self._least, self._preparing = found.least, found.preparing
        self._end = self.plan.end
        self.cuts: list[str] = []
        """What was done on fewer prompts than configured."""

    def begin(self, progress: Progress) -> None:
        """Say the plan. Raises `SearchError` if the time is too short for any result."""
        self._budget.check(self._least, SHORTEST)
        for line in self.lines():
            progress.say(line)

    def lines(self) -> Iterator[str]:
        """Yield the plan in words."""
        yield self._headline()
        for line in plan_lines(self.plan, self._sizes, unit=self._unit):
            yield f"  {line}"

    def tuning_prompts(self) -> Sequence[Prompt]:
        """Return the tuning prompts to decode."""
        prompts = self._first(self._task.prompts.tuning, self.plan.tuning, self._sizes.tuning)
        self._note_cut("tuned", self.plan.tuning, self._sizes.tuning, "tuning")
        self._sizes = replace(self._sizes, tuning=self.plan.tuning)
        return prompts

    def learn(self, tuning: Bench, seconds: float) -> Reserve:
        """Take the rate from decoding the tuning prompts, and return what race and confirmation need."""
        self._rate = rate_of(tuning, seconds, self._rate)
        self._sizes = replace(self._sizes, tuning=len(tuning.indices))
        left = self._budget.left
        if math.isinf(left):
            return Reserve(0.0, 0.0, 0.0)
        least = least_end(self._sizes, self._rate)
        for_end = max(least.seconds, END_SHARE * (left - self._preparing))
        end = plan_end(self._sizes, self._rate, for_end)
        return Reserve(end.set_aside, least.seconds, trial_seconds(self._sizes, self._rate))

    def plan_race(self, candidates: Sequence[TrialRecord], num_confirmed: int) -> EndPlan:
        """Return race and confirmation for the best trials, at their measured speed."""
        self._sizes = replace(self._sizes, confirmed=max(1, num_confirmed))
        speed = _speed(candidates)
        if self._sizes.heat:  # its trials were rated by the engine's rules, not by its kernels
            speed = min(speed, 1.0)
        self._end = plan_end(self._sizes, self._rate, self._budget.left, speed=speed)
        return self._end

    def heat_pace(self, end: EndPlan) -> Callable[[], bool]:
        """Return the question asked before each candidate of the heat: it leaves time for a lap of the race too."""
        return Pace(lambda: self._budget.left - end.after_race - end.lap_seconds)

    def race_pace(self, end: EndPlan) -> Callable[[], bool]:
        """Return the question asked before each lap of the race: it leaves time for the held-out prompts of `end`."""
        return Pace(lambda: self._budget.left - end.after_race)

    def held_out_prompts(self, finalists: Sequence[Finalist], num_confirmed: int) -> Sequence[Prompt]:
        """Return as many held-out prompts as can be decoded and confirmed in the time left, at least a few."""
        sizes = replace(self._sizes, confirmed=num_confirmed, finalists=0, heat=0)
        speed = _speed_of([each.measurement for each in finalists[:num_confirmed]])
        self._end = plan_end(sizes, self._rate, self._budget.left, speed=speed)
        count = self._end.held_out
        return self._first(self._task.prompts.held_out, count, self._sizes.held_out)

    def _first(self, prompts: Sequence[Prompt], count: int, wanted: int) -> Sequence[Prompt]:
        """Return the prompts of the first `count` samples; all of them, also those that fill no batch, if no sample is cut."""
        return prompts if count == wanted else prompts[: count * self._task.config.batch_size]

    def confirmation_pacer(self, num_left: int) -> Callable[[], bool] | None:
        """Return the pace of a candidate's confirmation, or None if no time is left: each gets an equal share of what is left."""
        left = self._budget.left - self._end.after_confirmation
        if math.isinf(left):
            return Pace(lambda: math.inf)
        if left < self._least_measured:
            return None
        until = left - left / num_left
        return Pace(lambda: self._budget.left - self._end.after_confirmation - until)

    def note_confirmed(self, confirmed: Sequence[Confirmed], held_out: Bench) -> None:
        """Note on how many held-out prompts the candidates were measured, the winner first, if time has cut any of them."""
        planned = self._end.held_out
        whole = len(held_out.indices) if planned == self._sizes.held_out else self._sizes.held_out
        winner, *rivals = [(each.label, len(each.measurement.samples)) for each in confirmed]
        if winner[1] < whole:
            self._note_cut("confirmed", winner[1], whole, "held-out")
        if fewer := [f"{label} on {count}" for label, count in rivals if count < winner[1]]:
            self.cuts.append(
                f"compared on fewer than the winner's {winner[1]} held-out {self._unit}: {', '.join(fewer)}"
            )

    def num_stock(self, winner: Measurement, num_held_out: int) -> int:
        """Return the number of held-out prompts, or batches, on which stock generation can be compared in the time left."""
        sizes, left = replace(self._sizes, stock=min(self._sizes.stock, num_held_out)), self._budget.left
        return stock_samples(sizes, self._rate, left - self._end.writing_seconds, speed=_speed_of([winner]))

    def stock_pace(self) -> Callable[[], bool]:
        """Return the question asked before each of these prompts: it leaves time for the results."""
        return Pace(lambda: self._budget.left - self._end.writing_seconds)

    @property
    def least_held_out(self) -> int:
        """Held-out prompts, or batches, on which a candidate is measured at least."""
        return min(LEAST_HELD_OUT, self._sizes.held_out)

    @property
    def _least_measured(self) -> float:
        return self._rate.measured(self.least_held_out)

    def _headline(self) -> str:
        spent, timeout = self._budget.spent, self._budget.timeout
        if timeout is None:
            total = spoken(spent + self.plan.total)
            return f"no --timeout: about {total} (estimate), of which {spoken(spent)} are spent; to come:"
        before = f", {spoken(self._budget.spent_before)} of them by earlier runs" if self._budget.spent_before else ""
        on_top = f"; {spoken(self._budget.on_top)} of distilling came on top" if self._budget.on_top else ""
        return f"--timeout {spoken(timeout)} for everything (estimate): {spoken(spent)} are spent{before}{on_top}; to come:"

    def _note_cut(self, done: str, used: int, configured: int, part: str) -> None:
        if used < configured:
            self.cuts.append(f"{done} on {used} of {configured} {part} {self._unit}, to keep within --timeout")


def _speed(records: Sequence[TrialRecord]) -> float:
    return _speed_of([record.measurement for record in records if record.measurement is not None])


def _speed_of(measurements: Sequence[Measurement]) -> float:
    """Return the speed-up of the measurements together: the seconds of all, plainly over drafted."""
    inverse = [1 / max(SLOWEST, each.speedup) for each in measurements if each.samples]
    return len(inverse) / sum(inverse) if inverse else 1.0


def plan_text(task: Task, found: Forecast) -> Iterator[str]:
    """Yield the plan of a search that is not begun, the distillation of heads included, or that its time is too short."""
    if found.distillation is not None:
        yield f"distillation of exit heads: about {spoken(found.distillation.total)} (--set distill=never declines)"
    yield from TimeKeeper(task, found).lines()
    if found.least > task.budget.left:
        needed = enough(task.budget.spent + found.least)
        yield f"too short: {SHORTEST} takes about {spoken(found.least)} (give a --timeout of {needed})"


def missing_time(task: Task) -> str:
    """Return where the time went, for a search that ended without a result."""
    stages = task.budget.clock.seconds()
    longest = sorted(stages, key=lambda stage: -stages[stage])[:3]
    return ", ".join(f"{stage} {spoken(stages[stage])}" for stage in longest if stage is not Stage.OTHER)
