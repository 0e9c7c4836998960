"""A worker: one process that runs the searches of a queue, one at a time, on one device.

It stands in the table of workers for as long as it lives. Jobs of workers that died are queued again by the others. A worker that
was taken for dead, as it was silent for long, ends at once: its job may run elsewhere.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import sqlalchemy as sa
from dbos import DBOS, DBOSPortableJSONSerializer

from decoding.errors import first_line
from tuner.errors import SearchError, StorageOutageError, TrackingOutageError
from tuner.progress import Progress
from tuner.service.contract import DEFAULT_QUEUE, JobProgress, JobResult, TableRow
from tuner.service.jobs import VERSION, WORKFLOW, Jobs
from tuner.service.workers import BEAT_SECONDS

if TYPE_CHECKING:
    from studies.contract import TrialRecord
    from tuner.measuring.contender import PriceList
    from tuner.review.document import SearchResult

OUTAGES = (StorageOutageError, TrackingOutageError, sa.exc.OperationalError)
"""Errors after which the same search may go on later."""
PATIENCE_SECONDS = 3600.0
"""Seconds for which a search waits for a store that does not answer, before it fails."""
STREAK_SECONDS = 600.0
"""Seconds of a search after which another outage counts as a new one."""
MOST_LINES = 20
"""Lines that a job keeps of its progress."""
LEAST_SECONDS = 1.0
"""Seconds between two notes of mere steps, which may be many a second."""
EXIT_TAKEN_FOR_DEAD = EXIT_IN_A_SEARCH = 75
"""Exit status, as sysexits' EX_TEMPFAIL, of a worker that ends with a search unfinished: starting a worker again is right."""


@dataclass(frozen=True)
class WorkerSettings:
    database: str
    tracking_uri: str
    folder: Path
    """Folder of the jobs' files, which all workers and the service share."""
    device: str = "auto"
    queue: str = DEFAULT_QUEUE
    name: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a configuration that the operator decides: the engine that searches are for."""
    beat: float = BEAT_SECONDS


RunJob = Callable[[str, Mapping[str, Any], WorkerSettings, Jobs], JobResult]
"""Runs the search with an id and a configuration to its end."""


class SearchWorker:
    """The worker of this process; DBOS allows one."""

    def __init__(self, settings: WorkerSettings, run: RunJob | None = None) -> None:
        self.settings = settings
        self._run_job = run_job if run is None else run
        self.name = f"{settings.name or f'{os.uname().nodename}-{os.getpid()}'}-{uuid4().hex[:8]}"
        self._stopped = threading.Event()
        self._job: str | None = None
        self._searching = threading.Lock()

    def run(self) -> None:
        settings = self.settings
        self._jobs = Jobs(settings.database)
        # Signs of life do not wait for a database that is away: they are due as soon as it is back.
        self._watch = Jobs(settings.database, is_patient=False)
        self._watch.workers.add(self.name, settings.device, settings.queue)
        try:
            self._launch()
            while not self._stopped.wait(settings.beat):
                self._look_after()
            if self._job is not None:
                # A thread cannot be interrupted. What a kill at any moment leaves is enough for the next worker.
                self._leave()
                os._exit(EXIT_IN_A_SEARCH)
        finally:
            DBOS.destroy(destroy_registry=True)
            self._leave()
            self._watch.close()
            self._jobs.close()

    def stop(self) -> None:
        """End the worker; another takes over its job."""
        self._stopped.set()

    def _launch(self) -> None:
        DBOS(
            config={
                "name": "sdtune",
                "system_database_url": self.settings.database,
                "executor_id": self.name,
                "application_version": VERSION,
                "serializer": DBOSPortableJSONSerializer(),
                "log_level": "ERROR",
            }
        )

        @DBOS.workflow(name=WORKFLOW)
        def tune(job: str, config: dict[str, Any]) -> dict[str, Any]:
            return self._tune(job, config)

        DBOS.listen_queues([self.settings.queue])
        DBOS.launch()
        DBOS.register_queue(self.settings.queue, worker_concurrency=1, polling_interval_sec=1.0)
        self._jobs.take_over()

    def _look_after(self) -> None:
        try:
            if not self._watch.workers.beat(self.name):
                os._exit(EXIT_TAKEN_FOR_DEAD)
            self._watch.take_over()
        except sa.exc.SQLAlchemyError:
            return  # the database is away: the next beat counts as well

    def _leave(self) -> None:
        """Say that the worker was stopped. Without a database it counts as dead, by and by."""
        with suppress(sa.exc.SQLAlchemyError):
            self._watch.workers.remove(self.name)

    def _tune(self, job: str, config: dict[str, Any]) -> dict[str, Any]:
        with self._searching:  # a cancelled one still ends its trial when the next one comes
            self._job = job
            self._jobs.note_progress(job, JobProgress())
            self._tell(job)
            try:
                return self._tune_patiently(job, config).model_dump(mode="json")
            finally:
                self._job = None
                self._tell(None)

    def _tune_patiently(self, job: str, config: dict[str, Any]) -> JobResult:
        """Run a search, again where a store interrupts it: that may answer later."""
        since = math.inf
        while True:
            began = time.monotonic()
            try:
                return self._run_job(job, config, self.settings, self._jobs)
            except OUTAGES as outage:
                now = time.monotonic()
                since = now if now - began > STREAK_SECONDS else min(since, now)
                if now - since > PATIENCE_SECONDS or self._jobs.is_cancelled(job):
                    raise
                self._jobs.note_progress(job, JobProgress(lines=[f"waits: {first_line(outage)}"]))
            self._stopped.wait(self.settings.beat)

    def _tell(self, job: str | None) -> None:
        with suppress(sa.exc.SQLAlchemyError):
            self._watch.workers.tell(self.name, job)


class StoredProgress(Progress):
    """The progress of a search, stored with its job; a cancelled job is interrupted where a user would press Ctrl-C."""

    def __init__(self, jobs: Jobs, job: str) -> None:
        self._jobs, self._job = jobs, job
        self._now = JobProgress()
        self._noted = 0.0

    def stage(self, name: str, total: int | None = None) -> None:
        self._note(stage=name, done=0, total=total)

    def advance(self, steps: int = 1) -> None:
        self._now = self._now.model_copy(update={"done": self._now.done + steps})
        if time.monotonic() - self._noted > LEAST_SECONDS:
            self._note()

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        best_draft = None if best is None else best.candidate.describe()
        best_speedup = None if best is None else best.speedup
        done = self._now.done + 1
        self._note(
            done=done,
            trials=self._now.trials + 1,
            best_speedup=best_speedup,
            best_draft=best_draft,
            lines=self._said(record.describe()),
        )

    def say(self, line: str) -> None:
        self._note(lines=self._said(line))

    def _said(self, line: str) -> list[str]:
        return [*self._now.lines, f"{datetime.now():%H:%M:%S} {line}"][-MOST_LINES:]

    def _note(self, **changes: object) -> None:
        self._now = self._now.model_copy(update=changes)
        self._jobs.note_progress(self._job, self._now)
        self._noted = time.monotonic()
        if self._jobs.is_cancelled(self._job):
            raise KeyboardInterrupt


def run_job(
    job: str,
    config: Mapping[str, Any],
    settings: WorkerSettings,
    jobs: Jobs,
    *,
    prices: PriceList | None = None,
) -> JobResult:
    """Run the search of a job, or what is left of it.

    `prices` are charged in place of seconds if they are given, for checks.
    """
    import optuna

    from tuner.results import plain_text
    from tuner.review.tables import results_table
    from tuner.search.run import search
    from tuner.search.task import open_budget, prepare
    from tuner.service.admission import placed
    from tuner.stage_clock import StageClock

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    folder = settings.folder / job
    folder.mkdir(parents=True, exist_ok=True)
    whole = placed(
        {**config, "device": settings.device, **settings.engine},
        job,
        database=settings.database,
        tracking_uri=settings.tracking_uri,
        folder=folder,
    )
    progress = StoredProgress(jobs, job)
    task = prepare(whole, progress, budget=open_budget(whole, StageClock()))
    task = replace(task, prices=prices)
    found = search(task, progress)
    if found.profile.provenance is None or found.profile.provenance.mlflow_run_id is None:
        raise SearchError("the search has no run in MLflow")
    measured = found.profile.measured
    jobs.note_verdict(job, "decode plainly" if measured is None else f"{measured.speedup}")
    return JobResult(
        profile=whole.out.read_text(encoding="utf-8"),
        files=list(found.profile.draft.files),
        claims_speedup=measured is not None,
        rows=_rows(found),
        report=plain_text(results_table(found)),
        mlflow_run=found.profile.provenance.mlflow_run_id,
    )


def _rows(found: SearchResult) -> list[TableRow]:
    from tuner.review.tables import PLAIN_DESCRIPTION, PLAIN_LABEL, description

    rows = [TableRow(label=PLAIN_LABEL, description=PLAIN_DESCRIPTION)]
    for each in found.rivals:
        interval = each.measurement.speedup_interval()
        low, high = interval.ci95
        words = description(each, found.winner)
        rows.append(TableRow(label=each.study, description=words, speedup=interval.value, low=low, high=high))
    return rows
