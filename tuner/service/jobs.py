"""Jobs in the database: submitted, listed, cancelled, resumed. DBOS is the queue; this process runs nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from dbos import DBOS, DBOSClient, DBOSPortableJSONSerializer, WorkflowStatus
from dbos._error import DBOSWorkflowIDInUseError

from decoding.errors import first_line
from tuner.databases import attempt, check_address, make_private
from tuner.errors import StorageError
from tuner.service.contract import (
    JobProgress,
    JobResult,
    JobState,
    SearchJob,
    TooManyJobsError,
    UnknownJobError,
)
from tuner.service.workers import Workers

WORKFLOW = "tune"
VERSION = "1"
"""Version of the jobs: workers run those of their own version only."""
QUEUE, PROGRESS, DEATHS, VERDICT = "queue", "progress", "deaths", "verdict"
"""Attributes of a workflow: its queue, which DBOS forgets when it is cancelled, its latest progress, the workers that died with it,
and what it has found."""
MOST_DEATHS = 2
"""Workers that may die with a search, one after the other without a finished trial, before it counts as what kills them."""

_STATES = {
    "DELAYED": JobState.QUEUED,
    "ENQUEUED": JobState.QUEUED,
    "PENDING": JobState.RUNNING,
    "SUCCESS": JobState.FINISHED,
    "CANCELLED": JobState.CANCELLED,
}
UNFINISHED = [status for status, state in _STATES.items() if not state.is_over]


class Jobs:
    """The jobs of one database. Its tables are made if they are missing. Raises `StorageError` if it cannot be used.

    While the database does not answer, a search waits for it. A server of requests is not patient, and gets SQLAlchemy's error.
    """

    def __init__(self, database: str, *, is_patient: bool = True) -> None:
        self.database = database
        check_address(database, what="the database of the service", error=StorageError)
        make_private(database)
        try:
            attempt(lambda: DBOS.migrate(database))
            self._engine = _open_engine(database)
            self._client = DBOSClient(
                system_database_url=database,
                # SQLite has an engine with settings of DBOS's own.
                system_database_engine=None if database.startswith("sqlite") else self._engine,
                serializer=DBOSPortableJSONSerializer(),
                retry_connection_errors=is_patient,
            )
            self.workers = Workers(self._engine)
        except (sa.exc.SQLAlchemyError, ImportError, OSError, ValueError) as cause:
            raise StorageError(f"cannot open the database of the service: {first_line(cause)}") from None

    def close(self) -> None:
        self._client.destroy()
        self._engine.dispose()

    def submit(
        self, job: str, config: Mapping[str, Any], queue: str, *, client: str = "", most: float = math.inf
    ) -> bool:
        """Queue a search under its id; return False if there was one, of any client.

        Raises `TooManyJobsError` if the client has `most` unfinished ones.
        """
        if self._client.list_workflows(workflow_ids=[job]):
            return False
        self._refuse_crowd(client, most)
        try:
            self._client.enqueue(
                {
                    "queue_name": queue,
                    "workflow_name": WORKFLOW,
                    "workflow_id": job,
                    "workflow_id_reuse_policy": "reject",  # of several at once, one is the first
                    "app_version": VERSION,
                    "authenticated_user": client,
                    "attributes": {QUEUE: queue},
                },
                job,
                dict(config),
            )
        except DBOSWorkflowIDInUseError:
            return False
        return True

    def _refuse_crowd(self, client: str, most: float) -> None:
        if math.isinf(most):
            return
        unfinished = self._client.list_workflows(
            name=WORKFLOW, user=client, status=UNFINISHED, load_input=False, load_output=False
        )
        if len(unfinished) >= most:
            raise TooManyJobsError(
                f"{len(unfinished)} searches of this client are not finished, and {most:.10g} may be: wait, or cancel one"
            )

    def find(self, job: str) -> SearchJob:
        return _job(self._status(job))

    def latest(self, limit: int = 100) -> list[SearchJob]:
        found = self._client.list_workflows(name=WORKFLOW, limit=limit, sort_desc=True, load_output=False)
        # Outputs hold reports and profiles, so only those of failed jobs are read: their errors.
        failed = [each.workflow_id for each in found if each.status == "ERROR"]
        errors = {each.workflow_id: each for each in self._client.list_workflows(workflow_ids=failed)} if failed else {}
        return [_job(errors.get(each.workflow_id, each)) for each in found]

    def result(self, job: str) -> JobResult | None:
        """Return what a finished job has found, None before. Raises `UnknownJobError`."""
        status = self._status(job)
        return JobResult.model_validate(status.output) if status.status == "SUCCESS" else None

    def cancel(self, job: str) -> SearchJob:
        """Stop a job: a running one after its trial, which stays on disk."""
        self._status(job)
        self._client.cancel_workflow(job)
        return self.find(job)

    def resume(self, job: str, *, client: str = "", most: float = math.inf) -> SearchJob:
        """Queue a cancelled or failed job again; finished trials are not repeated.

        Raises `TooManyJobsError` if the client has `most` unfinished ones.
        """
        status = self._status(job)
        if status.status == "CANCELLED" or _STATES.get(status.status) is None:
            self._refuse_crowd(client, most)
            self._client.update_workflow_attributes(job, {DEATHS: None}, merge=True)
            self._queue_again(status)
        return self.find(job)

    def _queue_again(self, status: WorkflowStatus) -> None:
        """Queue a job in its own queue, whatever became of it; its trials are in the storage."""
        queue = str(_attributes(status)[QUEUE])
        if status.status == "ERROR":
            self._client.rewind_workflow(status.workflow_id, start_step=1, queue_name=queue)
        else:
            self._client.resume_workflow(status.workflow_id, queue_name=queue)

    def note_progress(self, job: str, progress: JobProgress) -> None:
        self._client.update_workflow_attributes(job, {PROGRESS: progress.model_dump(mode="json")}, merge=True)

    def note_verdict(self, job: str, verdict: str) -> None:
        """Store what a search has found, in a few words: lists do not read results."""
        self._client.update_workflow_attributes(job, {VERDICT: verdict}, merge=True)

    def is_cancelled(self, job: str) -> bool:
        return self._status(job).status == "CANCELLED"

    def take_over(self) -> list[str]:
        """Queue the jobs of dead workers again, and clear these away. Return the jobs.

        One process at a time does this: a job that another has queued again may have begun since it was looked up. While another
        does it, nothing is left to do.
        """
        with self.workers.alone() as is_alone:
            if not is_alone:
                return []
            # Before the workers: who has taken one of these was among them already.
            running = self._client.list_workflows(name=WORKFLOW, status="PENDING", load_output=False)
            alive = {card.name: card.alive for card in self.workers.cards()}
            for name in (name for name, lives in alive.items() if not lives):
                self.workers.remove(name)
            orphans = [each for each in running if not alive.get(each.executor_id or "")]
            for each in orphans:
                # A worker that was stopped is gone from the table: no death.
                if each.executor_id in alive and self._is_deadly(each):
                    self._client.cancel_workflow(each.workflow_id)
                else:
                    self._queue_again(each)
            return [each.workflow_id for each in orphans]

    def _is_deadly(self, status: WorkflowStatus) -> bool:
        """Note the death of a worker with a job; return True if the job is what kills them."""
        count = 1 if _progress(status).trials > 0 else _deaths(status) + 1
        self._client.update_workflow_attributes(status.workflow_id, {DEATHS: count}, merge=True)
        return count >= MOST_DEATHS

    def _status(self, job: str) -> WorkflowStatus:
        found = self._client.list_workflows(workflow_ids=[job])
        if not found:
            raise UnknownJobError(f"there is no search {job[:100]!r}")
        return found[0]


def _open_engine(database: str) -> sa.Engine:
    """Return an engine for the workers of a database. Its errors do not repeat what was to be stored."""
    if database.startswith("sqlite"):
        return sa.create_engine(database, connect_args={"timeout": 60}, hide_parameters=True)
    # A server that is away or frozen is found within seconds.
    waits = {"connect_timeout": 5, "tcp_user_timeout": 10_000}
    return sa.create_engine(
        database,
        pool_pre_ping=True,
        pool_timeout=5,
        pool_size=20,
        max_overflow=20,
        connect_args=waits,
        hide_parameters=True,
    )


def _attributes(status: WorkflowStatus) -> Mapping[str, Any]:
    return status.attributes or {}


def _progress(status: WorkflowStatus) -> JobProgress:
    return JobProgress.model_validate(_attributes(status).get(PROGRESS, {}))


def _deaths(status: WorkflowStatus) -> int:
    return int(_attributes(status).get(DEATHS) or 0)


def _job(status: WorkflowStatus) -> SearchJob:
    config = status.input["args"][1] if status.input else {}
    error = None if status.error is None else first_line(status.error)
    state = _STATES.get(status.status, JobState.FAILED)
    if status.status == "CANCELLED" and _deaths(status) >= MOST_DEATHS:
        state = JobState.FAILED
        error = f"{MOST_DEATHS} workers died with this search, one after the other: see their logs"
    return SearchJob(
        id=status.workflow_id,
        state=state,
        queue=str(_attributes(status)[QUEUE]),
        model=config.get("model", ""),
        dataset=config.get("dataset", ""),
        created_seconds=(status.created_at or 0) / 1000,
        worker=status.executor_id if state is JobState.RUNNING else None,
        progress=_progress(status),
        verdict=_attributes(status).get(VERDICT) if state is JobState.FINISHED else None,
        error=error,
        mlflow_run=status.output.get("mlflow_run") if isinstance(status.output, dict) else None,
    )
