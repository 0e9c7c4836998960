"""Runs the studies of a search in order. Each knows the trials of the earlier ones and gets an equal share of the time left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

from decoding.drafts import EarlyExit
from studies.contract import Problem, Study, TrialRecord, best_trials
from studies.costs.table import CostTable
from studies.searches.registry import create_study
from tuner.executors.contract import Executor, Work
from tuner.freed_memory import freed_blocks_kept, large_blocks_given_back
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.search.budget import Budget
from tuner.search.devices import TrialDevices
from tuner.search.problem import build_problem
from tuner.search.steps import Steps
from tuner.search.storage import CONFIGURATION, StoredStudy, StudyStore
from tuner.search.task import Task
from tuner.search.time_budget import Reserve, TimedBudget
from tuner.search.trials import run_study
from tuner.stage_clock import Stage, StageClock
from tuner.tracking import Tracker

RUN_ID = "mlflow_run_id"


@dataclass(frozen=True)
class StudyEnd:
    """How a study ended."""

    why: str
    """Reason for the end, and remarks."""
    expected: dict[str, float]
    """Expected speed-ups by candidate key (`Study.expected`)."""


class StudySequence:
    """The studies of one search, run on the tuning prompts of `bench`. `store` owns the records of their trials.

    `reserve` is what race and confirmation need of the search's time.
    """

    def __init__(
        self,
        task: Task,
        heads: Mapping[int, EarlyExit],
        bench: Bench,
        store: StudyStore,
        tracker: Tracker,
        progress: Progress,
        reserve: Reserve,
    ) -> None:
        self._task, self._heads, self._bench = task, heads, bench
        self._store, self._tracker, self._progress = store, tracker, progress
        self._time, self._reserve = task.budget, reserve
        self._run_key = uuid4().hex
        self.ended: dict[str, str] = {}
        """Reason for the end of each study, and its remarks."""
        self.expected: dict[str, float] = {}
        """Expected speed-ups by candidate key (`Study.expected`)."""

    def run(self, steps: Steps) -> None:
        """Run all studies, each as a step."""
        with TrialDevices(self._task, self._bench, self._progress) as devices:
            self._run_all(steps, devices)

    def _run_all(self, steps: Steps, devices: TrialDevices) -> None:
        names = self._task.config.study
        for index, name in enumerate(names):
            run = partial(self._run, name, devices, studies_left=len(names) - index)
            with self._time.clock.stage(Stage.CHOOSING):
                end = steps.run(f"study {name}", run, StudyEnd)
            self._store.include(name)
            self.ended[name] = end.why
            self.expected |= end.expected
            self.note_time()

    def note_time(self) -> None:
        """Store the time of this run so far, so that a resumed search counts it."""
        self._store.note_elapsed(self._run_key, self._time.spent - self._time.spent_before)

    def _run(self, name: str, devices: TrialDevices, studies_left: int) -> StudyEnd:
        config = self._task.config
        share = max(0.0, self._left_for_trials()) / studies_left
        until = self._time.left - share  # left of the search's time when this study ends
        study, stored = self._open(name, share)
        self._show_earlier(name, stored.records())
        indices = self._bench.indices[: config.samples_per_trial]
        executor = StagedExecutor(devices, self._time.clock)
        # The last study may use what race and confirmation can do without until it has a result: nothing comes after it.
        wanted = stored.records if studies_left == 1 else self._store.records
        budget = self._budget(until, wanted)
        _, why = run_study(study, stored, executor, indices, budget, self._keep, most_repeats=devices.most_repeats)
        end = StudyEnd("; ".join([why, *study.remarks()]), dict(study.expected()))
        self._progress.say(f"{name}: {end.why}")
        return end

    def _budget(self, until: float, wanted: Callable[[], list[TrialRecord]]) -> Budget:
        """Return the budget of a study that ends when `until` seconds of the search are left.

        While none of the trials that `wanted` returns is complete, it may end later.
        """
        if self._time.timeout is None:
            return Budget(self._task.config.trials, None)
        return TimedBudget(
            self._task.config.trials,
            None,
            left=lambda: self._time.left - until,
            least_left=lambda: self._time.left - self._reserve.least,
            has_result=lambda: bool(best_trials(wanted(), 1)),
            trial_seconds=self._reserve.trial,
        )

    def _open(self, name: str, share: float) -> tuple[Study, StoredStudy]:
        """Create the study, from what it kept if it is stored, and open its storage."""
        self._progress.stage(f"{name}: preparing")
        before = self._time.clock.elapsed
        seconds_left = None if self._time.timeout is None else share
        problem = build_problem(
            self._task, self._heads, self._bench, self._store.records(), seconds_left, self._progress
        )
        with large_blocks_given_back():
            settings = self._task.config.study_settings(name)
            study = create_study(name, timed_as_usual(problem), settings, self._store.kept(name))
        seconds = self._time.clock.elapsed - before
        stored = self._store.open(study, self._task.identity, preparation_seconds=seconds)
        stored.note(RUN_ID, self._tracker.run_id)
        if self._task.configuration is not None:
            stored.note(CONFIGURATION, self._task.configuration)
        return study, stored

    def _show_earlier(self, name: str, earlier: Sequence[TrialRecord]) -> None:
        """Take over the trials of an earlier run."""
        if earlier:
            self._progress.say(
                f"{name}: {len(earlier)} finished trials found in {self._store.url}, going on from there"
            )
        with self._time.clock.stage(Stage.WRITING):
            for record in earlier:
                self._tracker.log_trial(record)
        self._progress.stage(name, self._max_trials(name))
        self._progress.advance(len(earlier))

    def _keep(self, record: TrialRecord) -> None:
        records = self._store.records()
        best = best_trials(records, 1)
        self._task.watch.look()
        with self._time.clock.stage(Stage.WRITING):
            self._tracker.log_trial(record)
            if best:
                self._tracker.log_history({len(records): {"best_speedup": best[0].speedup or 0.0}})
        self._progress.trial(record, best[0] if best else None)
        self.note_time()

    def _left_for_trials(self) -> float:
        """Return the seconds left beside those set aside; each study gets an equal share, so that the first does not take all."""
        return self._time.left - self._reserve.whole

    def _max_trials(self, name: str) -> int:
        """Return the most trials that a study may run, for the progress bar."""
        limits = (self._task.config.trials, self._task.config.study_settings(name).max_trials)
        return min(limit for limit in limits if limit is not None)


def timed_as_usual(problem: Problem) -> Problem:
    """Return the problem with costs that are measured with freed memory kept, as production runs."""
    measure = problem.costs
    if measure is None:
        return problem

    def costs(max_tokens: int) -> CostTable:
        with freed_blocks_kept():
            return measure(max_tokens)

    return replace(problem, costs=costs)


class StagedExecutor:
    """An executor whose trials, and the waiting for them, are charged to their stage; see `Executor`."""

    def __init__(self, executor: Executor, clock: StageClock) -> None:
        self._executor, self._clock = executor, clock

    @property
    def num_devices(self) -> int:
        """Number of trials that can run at a time."""
        return self._executor.num_devices

    def submit(self, number: int, work: Work) -> None:
        """Run the work of a trial."""
        with self._clock.stage(Stage.TRIALS):
            self._executor.submit(number, work)

    def wait(self) -> tuple[int, Any]:
        """Return the number and the result of a trial that has ended."""
        with self._clock.stage(Stage.TRIALS):
            return self._executor.wait()
