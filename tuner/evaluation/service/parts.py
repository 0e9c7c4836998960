"""The parts of a tuning service as processes that may be killed: service, worker, MLflow server, connections to the database."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
import torch
import uvicorn

from tuner.errors import SearchError
from tuner.evaluation.hardening.priced_search import SearchPlace, planted_prices
from tuner.evaluation.serving.processes import free_port
from tuner.service.admission import Allowed
from tuner.service.app import ServiceSettings, create_service
from tuner.service.client import ServiceClient
from tuner.service.contract import JobResult, ServiceError
from tuner.service.durable_steps import DurableSteps
from tuner.service.jobs import Jobs
from tuner.service.worker import SearchWorker, WorkerSettings, run_job

T = TypeVar("T")
BEAT_SECONDS, GRACE_SECONDS = 1.0, 30.0
"""Of the workers: a dead one of this machine is found at the next beat."""
START_SECONDS, ANSWER_SECONDS = 600.0, 900.0
"""Limits of a busy machine: for a server to start, and for a request that is sent until it is answered."""


@dataclass
class ServiceParts:
    """The parts around one database. `restart` starts the part that was killed, as a supervisor would."""

    place: SearchPlace
    database: str
    service_port: int = field(default_factory=free_port)
    tracking_port: int = field(default_factory=free_port)

    @property
    def is_postgresql(self) -> bool:
        """True if there are connections to kill."""
        return self.database.startswith("postgresql")

    @property
    def names(self) -> list[str]:
        """The parts that can be killed."""
        return ["worker", "service", "tracking", *(["connection"] if self.is_postgresql else [])]

    @property
    def steps_log(self) -> Path:
        """File with a line for each step that began, and for each whose result was stored."""
        return self.place.folder / "steps.log"

    @property
    def tracking_store(self) -> str:
        """Store behind the MLflow server."""
        return f"sqlite:///{self.place.database('tracking')}"

    def start(self) -> None:
        """Start all parts."""
        for name in ("tracking", "service", "worker"):
            self._start(name)
        _patiently(partial(_answers, f"http://127.0.0.1:{self.tracking_port}/health"), START_SECONDS)

    def kill(self, name: str, chance: Callable[[int], int]) -> bool:
        """Kill a part; `chance` draws one of several connections. Return False if there was none to kill."""
        if name == "connection":
            return self._end_connection(chance)
        if name == "tracking":
            os.killpg(self._tracking.pid, signal.SIGKILL)
            self._tracking.wait()
        else:
            self._processes[name].kill()
            self._processes[name].join()
        return True

    def restart(self, name: str) -> None:
        """Start a part that was killed; a connection, its owner opens again."""
        if name != "connection":
            self._start(name)

    def revive(self) -> None:
        """Start a worker that ended by itself, as a supervisor does."""
        if not self._processes["worker"].is_alive():
            self._start("worker")

    def stop(self) -> None:
        """End everything."""
        for process in self._processes.values():
            process.kill()
            process.join()
        os.killpg(self._tracking.pid, signal.SIGKILL)
        self._tracking.wait()

    def ask(self, request: Callable[[ServiceClient], T]) -> T:
        """Return the service's answer to a request, which is sent again while the service does not answer."""

        def answer() -> T:
            with ServiceClient(f"http://127.0.0.1:{self.service_port}") as client:
                return request(client)

        return _patiently(answer, ANSWER_SECONDS)

    def __post_init__(self) -> None:
        self._processes: dict[str, BaseProcess] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])

    def _start(self, name: str) -> None:
        if name == "tracking":
            self._tracking = _tracking_server(self.place.folder, self.tracking_store, self.tracking_port)
            return
        folder, said = self.place.folder, self.place.folder / f"{name}.txt"
        match name:
            case "service":
                work = partial(_serve, self.database, folder, self.service_port)
            case _:
                settings = WorkerSettings(
                    self.database,
                    f"http://127.0.0.1:{self.tracking_port}",
                    folder / "searches",
                    "cpu",
                    beat=BEAT_SECONDS,
                    grace=GRACE_SECONDS,
                )
                work = partial(_work, settings, self.steps_log)
        self._processes[name] = self._context.Process(target=_quietly, args=(work, said))
        self._processes[name].start()

    def _end_connection(self, chance: Callable[[int], int]) -> bool:
        """Have PostgreSQL end a connection of a worker or of the service."""
        engine = sa.create_engine(self.database, poolclass=sa.pool.NullPool)
        mine = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() ORDER BY pid"
        with engine.begin() as connection:
            pids = [row[0] for row in connection.execute(sa.text(mine))]
            if pids:
                victim = {"pid": pids[chance(len(pids))]}
                connection.execute(sa.text("SELECT pg_terminate_backend(:pid)"), victim)
        return bool(pids)


class LoggedSteps:
    """Durable steps that note in a file which begin, and which have their result stored."""

    def __init__(self, job: str, log: Path) -> None:
        self._steps, self._job, self._log = DurableSteps(), job, log

    def run(self, name: str, work: Callable[[], T], kind: Any) -> T:
        """See `Steps.run`."""

        def noted() -> T:
            self._note("begun", name)
            return work()

        result = self._steps.run(name, noted, kind)
        self._note("stored", name)
        return result

    def _note(self, what: str, name: str) -> None:
        with self._log.open("a", encoding="utf-8") as file:
            file.write(f"{self._job}\t{what}\t{name}\n")


def repeated_steps(log: Path, job: str) -> list[str]:
    """Return the steps of a job that began again although their result was stored."""
    stored, repeated = set[str](), list[str]()
    for line in log.read_text(encoding="utf-8").splitlines():
        of, what, name = line.split("\t")
        if of == job and what == "stored":
            stored.add(name)
        elif of == job and name in stored:
            repeated.append(name)
    return repeated


@contextmanager
def running(parts: ServiceParts) -> Iterator[ServiceParts]:
    """Run the parts for a while."""
    parts.start()
    try:
        yield parts
    finally:
        parts.stop()


def _serve(database: str, folder: Path, port: int) -> None:
    allowed = Allowed([str(folder / "model")], [str(folder / "prompts.jsonl")])
    app = create_service(Jobs(database), ServiceSettings(allowed, folder / "searches"))
    uvicorn.run(app, port=port, log_level="error")


def _work(settings: WorkerSettings, log: Path) -> None:
    torch.set_num_threads(1)

    def run(job: str, config: Mapping[str, Any], own: WorkerSettings, jobs: Jobs) -> JobResult:
        return run_job(job, config, own, jobs, steps=LoggedSteps(job, log), prices=planted_prices())

    SearchWorker(settings, run=run).run()


def _quietly(work: Callable[[], None], said: Path) -> None:
    """Do the work of a process, with its output in a file."""
    with said.open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    work()


def _tracking_server(folder: Path, store: str, port: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        store,
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    command += ["--artifacts-destination", str(folder / "artefacts")]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "tracking.txt").open("ab") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=output, cwd=folder, env={**os.environ, **quiet}, start_new_session=True
        )


def _answers(address: str) -> None:
    try:
        urllib.request.urlopen(address, timeout=10).close()
    except (urllib.error.URLError, OSError) as cause:
        raise ServiceError(str(cause)) from None


def _patiently(call: Callable[[], T], seconds: float) -> T:
    """Return what `call` returns, called again for as long as the other side is away. Raises `SearchError` at the end."""
    end = time.monotonic() + seconds
    while True:
        try:
            return call()
        except ServiceError as refusal:
            if time.monotonic() > end:
                raise SearchError(f"no answer within {seconds:.0f} s: {refusal}") from None
            time.sleep(0.2)
