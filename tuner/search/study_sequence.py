"""Runs the studies of a search in order. Each knows the trials of the earlier ones and gets an equal share of the time left."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from decoding.drafts import EarlyExit
from studies.contract import Study, TrialRecord, best_trials
from studies.searches.registry import create_study
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.search.problem import build_problem
from tuner.search.storage import StoredStudy, StudyStore
from tuner.search.task import Task
from tuner.search.trials import Budget, run_study
from tuner.tracking import Tracker

RUN_ID = "mlflow_run_id"


class StudySequence:
    """The studies of one search, run on the tuning prompts of `bench`. `store` owns the records of their trials."""

    def __init__(
        self,
        task: Task,
        heads: Mapping[int, EarlyExit],
        bench: Bench,
        store: StudyStore,
        tracker: Tracker,
        progress: Progress,
    ) -> None:
        self._task, self._heads, self._bench = task, heads, bench
        self._store, self._tracker, self._progress = store, tracker, progress
        self.ended: dict[str, str] = {}
        """Reason for the end of each study, and its remarks."""
        self.expected: dict[str, float] = {}
        """Expected speed-ups by candidate key (`Study.expected`)."""

    def run(self) -> None:
        """Run all studies."""
        names = self._task.config.study
        for index, name in enumerate(names):
            self._run(name, studies_left=len(names) - index)

    def _run(self, name: str, studies_left: int) -> None:
        config = self._task.config
        study, stored = self._open(name, studies_left)
        self._show_earlier(name, stored.records())
        budget = Budget(config.trials, self._share_of_time(studies_left))
        indices = self._bench.indices[: config.samples_per_trial]
        _, why = run_study(study, stored, self._bench, indices, budget, self._keep)
        self.ended[name] = "; ".join([why, *study.remarks()])
        self.expected |= study.expected()
        self._progress.say(f"{name}: {self.ended[name]}")

    def _open(self, name: str, studies_left: int) -> tuple[Study, StoredStudy]:
        """Create the study, from what it kept if it is stored, and open its storage."""
        self._progress.stage(f"{name}: preparing")
        start = time.perf_counter()
        share = self._share_of_time(studies_left)
        problem = build_problem(self._task, self._heads, self._bench, self._store.records(), share, self._progress)
        study = create_study(name, problem, self._task.config.study_settings(name), self._store.kept(name))
        seconds = time.perf_counter() - start
        stored = self._store.open(study, self._task.identity, preparation_seconds=seconds)
        stored.note(RUN_ID, self._tracker.run_id)
        return study, stored

    def _show_earlier(self, name: str, earlier: Sequence[TrialRecord]) -> None:
        """Take over the trials of an earlier run."""
        if earlier:
            self._progress.say(
                f"{name}: {len(earlier)} finished trials found in {self._store.url}, going on from there"
            )
        for record in earlier:
            self._tracker.log_trial(record)
        self._progress.stage(name, self._max_trials(name))
        self._progress.advance(len(earlier))

    def _keep(self, record: TrialRecord) -> None:
        self._tracker.log_trial(record)
        best = best_trials(self._store.records(), 1)
        self._progress.trial(record, best[0] if best else None)

    def _share_of_time(self, studies_left: int) -> float | None:
        """Return an equal share of the search time left, so that the first study does not take it all."""
        timeout = self._task.config.timeout
        return None if timeout is None else max(0.0, timeout - self._store.spent_seconds()) / studies_left

    def _max_trials(self, name: str) -> int:
        """Return the most trials that a study may run, for the progress bar."""
        limits = (self._task.config.trials, self._task.config.study_settings(name).max_trials)
        return min(limit for limit in limits if limit is not None)
