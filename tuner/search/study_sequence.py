"""Runs the studies of a search in order, and beside each other on several devices where they do not read each other's trials.

Each gets an equal share of the time left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from decoding.drafts import EarlyExit
from studies.contract import Problem, Study, TrialRecord, best_trials
from studies.costs.table import CostTable
from studies.searches.registry import create_study
from tuner.executors.contract import Executor, TrialDevice, Work
from tuner.freed_memory import freed_blocks_kept, large_blocks_given_back
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.search.budget import Budget
from tuner.search.devices import TrialDevices
from tuner.search.problem import build_problem
from tuner.search.steps import Steps
from tuner.search.storage import CONFIGURATION, StoredStudy, StudyStore
from tuner.search.study_run import StudyRun
from tuner.search.task import Task
from tuner.search.time_budget import Reserve, TimedBudget
from tuner.search.trials import StudyTurns
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
        for group in self._task.config.study_groups:
            with _Group(group, partial(self._turns, devices)) as beside:
                for name in group:
                    with self._time.clock.stage(Stage.CHOOSING):
                        end = steps.run(f"study {name}", partial(self._end_of, name, beside), StudyEnd)
                    self._store.include(name)
                    self.ended[name] = end.why
                    self.expected |= end.expected
                    self.note_time()

    def note_time(self) -> None:
        """Store the time of this run so far, so that a resumed search counts it."""
        self._store.note_elapsed(self._run_key, self._time.spent - self._time.spent_before)

    def _end_of(self, name: str, group: _Group) -> StudyEnd:
        """Run trials of the group until this study has ended."""
        run = group.until_ended(name)
        study, why = run.study, run.ended or ""
        end = StudyEnd("; ".join([why, *study.remarks()]), dict(study.expected()))
        self._progress.say(f"{name}: {end.why}")
        return end

    def _turns(self, devices: TrialDevices, names: Sequence[str]) -> StudyTurns:
        """Return the turns of studies that share the devices, and the time of all of them."""
        studies = self._task.config.study
        studies_left = len(studies) - studies.index(names[0])
        share = max(0.0, self._left_for_trials()) / studies_left  # of one study
        until = self._time.left - share * len(names)  # left of the search's time when these studies end
        executor = StagedExecutor(devices, self._time.clock)
        earlier = self._store.records()

        def runs() -> Iterator[StudyRun]:
            opened: dict[str, StoredStudy] = {}
            for name in names:
                # Preparing takes this process, whose time is shared too.
                study, opened[name] = self._open(name, share, earlier)
                self._show_earlier(name, opened[name].records())
                self._show_studies(opened)
                # The last studies may use what race and confirmation can do without until they have a result.
                is_last = studies_left == len(names)
                budget = self._budget(until, opened[name].records if is_last else self._store.records)
                indices = self._bench.indices[: self._task.config.samples_per_trial]
                yield StudyRun(
                    study, opened[name], executor, indices, budget, self._keep, most_repeats=devices.most_repeats
                )

        return StudyTurns(runs(), executor)

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

    def _open(self, name: str, share: float, earlier: Sequence[TrialRecord]) -> tuple[Study, StoredStudy]:
        """Create the study, from what it kept if it is stored, and open its storage. It may read the trials of `earlier`."""
        self._progress.stage(f"{name}: preparing")
        before = self._time.clock.elapsed
        seconds_left = None if self._time.timeout is None else share
        settings = self._task.config.study_settings(name)
        known = earlier if settings.reads_earlier else ()
        problem = build_problem(self._task, self._heads, self._bench, known, seconds_left, self._progress)
        with large_blocks_given_back():
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

    def _show_studies(self, opened: Mapping[str, StoredStudy]) -> None:
        """Show the trials of the studies that take turns, with those of an earlier run."""
        self._progress.stage(", ".join(opened), sum(map(self._max_trials, opened)))
        self._progress.advance(sum(len(stored.records()) for stored in opened.values()))

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


class _Group:
    """Studies that run beside each other, made when the first of them has to run. A context manager, which ends their trials."""

    def __init__(self, names: Sequence[str], make: Callable[[Sequence[str]], StudyTurns]) -> None:
        self._names, self._make = names, make
        self._open = ExitStack()
        self._turns: StudyTurns | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def until_ended(self, name: str) -> StudyRun:
        """Run trials until this study has ended. Those before it in the group have ended, here or in another process."""
        if self._turns is None:
            self._turns = self._open.enter_context(self._make(self._names[self._names.index(name) :]))
        return self._turns.until_ended(name)


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

    def __init__(self, executor: Executor[TrialDevice], clock: StageClock) -> None:
        self._executor, self._clock = executor, clock

    @property
    def num_devices(self) -> int:
        """Number of trials that can run at a time."""
        return self._executor.num_devices

    def submit(self, task: str, work: Work[TrialDevice]) -> None:
        """Run the work of a trial."""
        with self._clock.stage(Stage.TRIALS):
            self._executor.submit(task, work)

    def wait(self) -> tuple[str, Any]:
        """Return the name and the result of a trial that has ended."""
        with self._clock.stage(Stage.TRIALS):
            return self._executor.wait()
