"""The tuning service and its workers in this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import uvicorn
from click.testing import CliRunner, Result

from decoding.serving.connections import uvicorn_settings
from tuner.cli.main import main
from tuner.service.admission import Allowed
from tuner.service.app import ServiceSettings, create_service
from tuner.service.jobs import Jobs
from tuner.service.worker import RunJob, SearchWorker, WorkerSettings

Command = Callable[..., Result]


@contextmanager
def serving(folder: Path, jobs: Jobs) -> Iterator[Command]:
    """Run the service; yield `sdtune jobs` as a function of its arguments."""
    allowed = Allowed([str(folder / "model")], [str(folder / "prompts.jsonl")])
    app = create_service(jobs, ServiceSettings(allowed, folder / "searches"))
    with listening(app) as address:
        yield lambda *given: CliRunner().invoke(main, ["jobs", "--address", address, *given])


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Run an application; yield its address."""
    listener = socket.create_server(("127.0.0.1", 0))  # held from the first: a port that is free now may be taken later
    server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=1, **uvicorn_settings("error")))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def working(
    folder: Path, jobs: Jobs, run: RunJob, beat: float = 0.2, engine: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[None]:
    """Run a worker."""
    settings = WorkerSettings(
        jobs.database, f"sqlite:///{folder / 'mlflow.db'}", folder / "searches", "cpu", beat=beat, engine=engine
    )
    worker = SearchWorker(settings, run=run)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
        until(
            lambda: not any(card.job for card in jobs.workers.cards())
        )  # with a search, it would end the whole process
    finally:
        worker.stop()
        thread.join()


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
