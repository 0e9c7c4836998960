"""The studies of a search, one after another: each gets an equal share of the time left, and what it keeps is stored with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from uuid import uuid4

from decoding.drafts import EarlyExit
from studies.contract import Problem, Study, TrialRecord, best_trials
from studies.costs.table import CostTable
from studies.searches.registry import create_study
from tuner.freed_memory import freed_blocks_kept, large_blocks_given_back
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.search.budget import TrialTime
from tuner.search.deployment import RuledBench
from tuner.search.objective import Trials
from tuner.search.problem import build_problem
from tuner.search.storage import CONFIGURATION, StoredStudy, StudyStore
from tuner.search.task import Task
from tuner.stage_clock import Stage
from tuner.tracking import Tracker

RUN_ID = "mlflow_run_id"


@dataclass
class StudyRuns:
    """The studies of one search in this process, on the tuning prompts of `bench`; `store` owns the records of their trials."""

    task: Task
    heads: Mapping[int, EarlyExit]
    bench: Bench
    store: StudyStore
    tracker: Tracker
    progress: Progress
    ended: dict[str, str] = field(default_factory=dict)
    """Reason for the end of each study, and its remarks."""
    expected: dict[str, float] = field(default_factory=dict)
    """Expected speed-ups by candidate key (`Study.expected`)."""
    _run: str = field(default_factory=lambda: uuid4().hex)

    def run(self) -> None:
        """Run all studies."""
        clock = self.task.budget.clock
        names = self.task.config.study
        for number, name in enumerate(names):
            with clock.stage(Stage.CHOOSING):
                share = self.task.budget.left_for_trials / (len(names) - number)
                until = self.task.budget.left - share  # preparing takes time of the share too
                study, stored, most = self._open(name, share)
                deployment = self.task.deployment
                trials = Trials(
                    study,
                    stored,
                    self.bench if deployment is None else RuledBench(self.bench, deployment.rules),
                    self.bench.indices[: self.task.config.samples_per_trial],
                    most=most,
                    limit=self._time(until, stored.records if name == names[-1] else self.store.records),
                    on_record=self._keep,
                    measuring=lambda: clock.stage(Stage.TRIALS),
                )
                _, why = trials.run()
            self.ended[name] = "; ".join([why, *study.remarks()])
            self.expected |= study.expected()
            self.progress.say(f"{name}: {self.ended[name]}")
            self.note_time()

    def note_time(self) -> None:
        """Store the time of this run so far, so that a resumed search counts it."""
        budget = self.task.budget
        self.store.note_run(self._run, budget.spent - budget.spent_before)

    def _open(self, name: str, share: float) -> tuple[Study, StoredStudy, int]:
        """Create the study, from what it kept if it is stored, and open its storage; one process does so at a time.

        Returns both, and the number of its trials at most.
        """
        task, clock = self.task, self.task.budget.clock
        with self.store.lock():
            self.progress.stage(f"{name}: preparing")
            before = clock.elapsed
            settings = task.config.study_settings(name)
            earlier = self.store.records() if settings.reads_earlier else ()
            seconds = None if task.budget.timeout is None else share
            problem = build_problem(task, self.heads, self.bench, earlier, seconds, self.progress)
            with large_blocks_given_back():
                study = create_study(name, timed_as_usual(problem), settings, self.store.kept(name))
            stored = self.store.open(study, task.identity, preparation_seconds=clock.elapsed - before)
            stored.note(RUN_ID, self.tracker.run_id)
            if task.configuration is not None:
                stored.note(CONFIGURATION, task.configuration)
        done = len(stored.records())
        if done:
            self.progress.say(f"{name}: {done} finished trials found in {self.store.url}, going on from there")
        most = min(limit for limit in (task.config.trials, settings.max_trials) if limit is not None)
        self.progress.stage(name, most)
        self.progress.advance(done)
        return study, stored, most

    def _time(self, until: float, wanted: Callable[[], list[TrialRecord]]) -> TrialTime | None:
        """Return the time of a study that ends when `until` seconds are left of the search.

        While none of the trials that `wanted` returns is complete, it may use more.
        """
        budget = self.task.budget
        if budget.timeout is None:
            return None
        return TrialTime(
            budget,
            keep=until,
            least=budget.least.seconds(budget.plain),
            expected=budget.trial_seconds(self.task.config.samples_per_trial),
            has_result=lambda: bool(best_trials(wanted(), 1)),
        )

    def _keep(self, record: TrialRecord) -> None:
        records = self.store.records()
        best = best_trials(records, 1)
        self.task.watch.look()
        with self.task.budget.clock.stage(Stage.WRITING):
            self.tracker.log_trial(record)
            if best:
                self.tracker.log_history({len(records): {"best_speedup": best[0].speedup or 0.0}})
        self.progress.trial(record, best[0] if best else None)
        self.note_time()


def timed_as_usual(problem: Problem) -> Problem:
    """Return the problem with costs that are measured with freed memory kept, as production runs."""
    measure = problem.costs
    if measure is None:
        return problem

    def costs(max_tokens: int) -> CostTable:
        with freed_blocks_kept():
            return measure(max_tokens)

    return replace(problem, costs=costs)
