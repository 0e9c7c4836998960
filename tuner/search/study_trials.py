"""The studies of a search, one after another: the problem of each, and its equal share of the time left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import optuna

from decoding.drafts import EarlyExit
from decoding.lockstep import shared_batch_size
from studies.contract import Problem, StudySettings, TrialRecord, best_trials
from studies.costs.table import CostTable
from studies.samplers import load_sampler
from studies.samplers.contract import StudySampler
from tuner.errors import ConfigError
from tuner.measuring.cost_table import cost_table
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.search.budget import TrialTime
from tuner.search.objective import Trials
from tuner.search.storage import CONFIGURATION, LOGGING, StoredStudy, StudyStore
from tuner.search.task import Task
from tuner.stage_clock import Stage
from tuner.tracking import Tracker

RUN_ID = "mlflow_run_id"
COSTS_SHARE = 0.1
"""Share of a study's time after which a cost table of a disturbed machine is not measured for longer."""


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
    """Expected speed-ups by candidate key (`StudySampler.expected`)."""
    _run: str = field(default_factory=lambda: uuid4().hex)

    def run(self) -> None:
        """Run all studies."""
        clock = self.task.budget.clock
        names = self.task.config.study
        for number, name in enumerate(names):
            with clock.stage(Stage.CHOOSING):
                budget, settings = self.task.budget, self.task.config.study_settings(name)
                sampler, stored = self._open(name, settings, budget.left_for_trials / (len(names) - number))
                budget.fit_trials(budget.left)  # preparing may have taken longer than was thought
                # Shared out anew: preparing takes time of race and confirmation too, not of the trials alone.
                until = budget.left - budget.left_for_trials / (len(names) - number)
                done = len(stored.records())
                if done:
                    self.progress.say(f"{name}: {done} finished trials found in {self.store.url}, going on from there")
                most = min(limit for limit in (self.task.config.trials, settings.max_trials) if limit is not None)
                self.progress.stage(name, most)
                self.progress.advance(done)
                deployment = self.task.deployment
                trials = Trials(
                    sampler,
                    stored,
                    self.bench,
                    self.bench.indices[: budget.of_trial],
                    most=most,
                    patience=settings.idle_limit,
                    limit=self._time(until, stored.records if name == names[-1] else self.store.records),
                    on_record=self._keep,
                    measuring=lambda: clock.stage(Stage.TRIALS),
                    check=(lambda candidate: None) if deployment is None else deployment.rules.check,
                )
                _, why = trials.run()
            self.ended[name] = "; ".join([why, *sampler.remarks()])
            self.expected |= sampler.expected()
            # Ours may hold surveys as large as the model's weights.
            stored.study.sampler = optuna.samplers.RandomSampler()
            self.progress.say(f"{name}: {self.ended[name]}")
            self.note_time()

    def note_time(self) -> None:
        """Store the time of this run so far, so that a resumed search counts it."""
        budget = self.task.budget
        self.store.note_run(self._run, budget.spent - budget.spent_before)

    def _open(self, name: str, settings: StudySettings, share: float) -> tuple[StudySampler, StoredStudy]:
        """Open the stored study `name`, which its sampler begins or resumes; one process does so at a time."""
        task, clock = self.task, self.task.budget.clock
        with self.store.lock():
            self.progress.stage(f"{name}: preparing")
            earlier = self.store.records() if settings.reads_earlier else ()
            seconds = None if task.budget.timeout is None else share
            problem = build_problem(task, self.heads, self.bench, earlier, seconds, self.progress)
            try:
                sampler = load_sampler(name)(problem, settings)
            except ValueError as cause:
                raise ConfigError(str(cause)) from None
            stored = self.store.open(sampler, task.identity, elapsed=lambda: clock.elapsed)
            stored.note(RUN_ID, self.tracker.run_id)
            if task.configuration is not None:
                stored.note(CONFIGURATION, task.configuration)
        return sampler, stored

    def _time(self, until: float, wanted: Callable[[], list[TrialRecord]]) -> TrialTime | None:
        """Return the time of a study that ends when `until` seconds are left of the search.

        While none of the trials that `wanted` returns is complete, it may use more.
        """
        budget = self.task.budget
        if budget.timeout is None:
            return None
        return TrialTime(budget, until, has_result=lambda: bool(best_trials(wanted(), 1)))

    def _keep(self, record: TrialRecord) -> None:
        records = self.store.records()
        best = best_trials(records, 1)
        self.task.watch.look()
        with self.task.budget.clock.stage(Stage.WRITING):
            with self.store.lock(what=LOGGING):
                self.tracker.log_trial(record)
            if best:
                self.tracker.log_history({len(records): {"best_speedup": best[0].speedup or 0.0}})
        self.progress.trial(record, best[0] if best else None)
        self.note_time()


def build_problem(
    task: Task,
    heads: Mapping[int, EarlyExit],
    bench: Bench,
    records: Iterable[TrialRecord],
    seconds: float | None,
    progress: Progress,
    *,
    costs_folder: Path | None = None,
) -> Problem:
    """Return the problem of a study on the tuning prompts of `bench`, after the trials of `records`.

    `seconds` is the search time that the study may use; `costs_folder` overrides the folder in which measured costs are kept.
    """
    earlier: dict[str, list[TrialRecord]] = {}
    for record in records:
        earlier.setdefault(record.study, []).append(record)

    def costs(max_tokens: int) -> CostTable:
        return _costs(task, bench, max_tokens, seconds, progress, costs_folder)

    return Problem(
        target=task.target,
        prompts=bench.prompts,
        continuations=bench.continuations,
        earlier=earlier,
        seed=task.config.seed,
        known=bench.baseline.known,
        own_keys=task.deployment is not None and not task.deployment.rules.runs_profiles,
        batch_size=bench.batch_size,
        decoding=task.decoding,
        head_drafts=heads,
        heads=task.head_folder,
        costs=costs,
        seconds=seconds,
        accepts=(lambda draft: True) if task.deployment is None else task.deployment.rules.accepts,
    )


def _costs(
    task: Task, bench: Bench, max_tokens: int, seconds: float | None, progress: Progress, folder: Path | None
) -> CostTable:
    """Return the costs of passes on this device, measured unless they are stored, and say what they are."""
    lengths = [len(prompt) for prompt in bench.prompts]
    with task.budget.clock.stage(Stage.COSTS):
        table = cost_table(
            task.target,
            max_tokens=max_tokens,
            contexts=tuple(sorted({min(lengths), max(lengths) + bench.max_new_tokens})),
            progress=progress,
            num_sequences=task.config.batch_size,
            bits=task.config.wanted_bits(task.target.device),
            folder=folder,
            most_seconds=math.inf if seconds is None else COSTS_SHARE * seconds,
            seed=task.config.seed,
        )
    task.watch.note_cost_error(table.error.median)
    decode_in_lockstep = shared_batch_size(task.target, task.config.batch_size)
    progress.say(
        f"{f'{decode_in_lockstep} sequences in lockstep: ' if decode_in_lockstep > 1 else ''}{table.describe()}"
    )
    return table
