"""Is anything lost or doubled when processes of a search are killed at any moment? Exit status 1 if it is.

Searches with planted costs, as `benchmarks.small_search` makes them, run in each way that a user can run one. At random moments a
process of theirs is killed (SIGKILL) and, as a supervisor would, started again:

* `alone`: one process, trials in SQLite; a few trials, some by a study that derives each candidate from the one before
* `two on SQLite`: processes on one file that join one search
* `eight on PostgreSQL`: the same on a server that is started for it; its programs must be installed
* `ray`: `search_on_ray` on nodes of a cluster on this host; a node is killed, and another takes its place
* `service`: jobs over HTTP; a worker, the service, the MLflow server or, with PostgreSQL, a connection is killed

All but the first run --trials short trials. Each search must end with the winner of an undisturbed one, one profile, and one run in
MLflow with one nested run a trial. No finished trial may be lost, doubled or changed, and none may be left open.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest import mock

import optuna
import sqlalchemy as sa
import torch
import uvicorn

from benchmarks.postgres import postgres
from benchmarks.results import show, write
from benchmarks.small_search import (
    LIMIT_SECONDS,
    CheckOutcome,
    Records,
    SearchPlace,
    changed,
    difference,
    finished_trials,
    planted_prices,
    planted_search,
    winner_of,
)
from benchmarks.task import arguments
from tuner.config import SearchConfig
from tuner.engines.server import free_port
from tuner.errors import SearchError
from tuner.progress import Unwatched
from tuner.search import several
from tuner.search.outcome import write_stored
from tuner.service.admission import OF_THE_SERVICE, Allowed
from tuner.service.app import ServiceSettings, create_service
from tuner.service.client import ServiceClient
from tuner.service.contract import SearchRequest, ServiceError
from tuner.service.jobs import Jobs
from tuner.service.worker import SearchWorker, WorkerSettings, run_job

T = TypeVar("T")
HOST = "127.0.0.1"
BEAT_SECONDS = 1.0
"""Of the service's workers: a dead one of this machine is found at the next beat."""
POLL_SECONDS, ANSWER_SECONDS = 0.2, 900.0
"""Between two looks at a search, and for a request that is sent until it is answered."""
SHARE = 0.5
"""Longest time between two kills, as a share of an undisturbed search: most searches meet several."""


class Way(ABC):
    """A way to run one search at a time, whose parts may be killed."""

    def __init__(self, place: SearchPlace) -> None:
        self.place = place

    @abstractmethod
    def begin(self, name: str) -> None:
        """Start a new search."""

    @abstractmethod
    def is_over(self) -> bool:
        """Return whether the search has ended, well or badly; start what ended by itself and should not have."""

    @abstractmethod
    def kill(self, chance: random.Random) -> str | None:
        """Kill a part and start it again; return its name, or None if there was none to kill."""

    @abstractmethod
    def failure(self) -> str | None:
        """Return how a search failed that is over, or None."""

    @abstractmethod
    def stop(self) -> None:
        """Kill what still runs."""

    def experiment(self, name: str) -> str:
        return name

    def records(self, name: str) -> Records:
        return self.place.records(name)

    def winner(self, name: str) -> Any:
        return self.place.winner(name)


class Processes(Way):
    """Processes that each run the same command on one storage."""

    def __init__(self, place: SearchPlace, count: int) -> None:
        super().__init__(place)
        self._count = count
        self._processes: list[BaseProcess] = []

    def begin(self, name: str) -> None:
        self._name, self._failures = name, list[str]()
        self._processes = [self._started(number) for number in range(self._count)]

    def is_over(self) -> bool:
        return not any(each.is_alive() for each in self._processes)

    def kill(self, chance: random.Random) -> str | None:
        living = [number for number, each in enumerate(self._processes) if each.is_alive()]
        if not living:
            return None
        number = chance.choice(living)
        self._processes[number].kill()
        self._processes[number].join()
        self._processes[number] = self._started(number)
        return "process"

    def failure(self) -> str | None:
        ended = [self.place.failure(self._said(number), each.exitcode) for number, each in enumerate(self._processes)]
        return next(filter(None, ended), None)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _started(self, number: int) -> BaseProcess:
        return self.place.start(self._name, said=self._said(number))

    def _said(self, number: int) -> str:
        return f"{self._name}-{number}"


class OnRay(Way):
    """The devices of a Ray cluster: nodes on this host."""

    NUM_NODES = 2

    def __init__(self, place: SearchPlace) -> None:
        from ray.cluster_utils import Cluster

        super().__init__(place)
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._nodes = [self._cluster.add_node(num_cpus=1) for _ in range(self.NUM_NODES)]
        self._process: BaseProcess | None = None

    def begin(self, name: str) -> None:
        config = self.place.config(name, ray=self._cluster.address, device="cpu")
        self._name = name
        self._process = self.place.process(name, _search_on_ray, config)

    def is_over(self) -> bool:
        assert self._process is not None
        return not self._process.is_alive()

    def kill(self, chance: random.Random) -> str | None:
        self._cluster.remove_node(self._nodes.pop(chance.randrange(len(self._nodes))), allow_graceful=False)
        self._nodes.append(self._cluster.add_node(num_cpus=1))
        return "node"

    def failure(self) -> str | None:
        assert self._process is not None
        return self.place.failure(self._name, self._process.exitcode)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._cluster.shutdown()


def _search_on_ray(config: SearchConfig) -> None:
    with mock.patch.object(several, "_joined", planted_joined):  # which has no prices to charge
        several.search_on_ray(config, Unwatched())
    write_stored(config)


def planted_joined(settings: dict[str, Any], folder: str) -> None:
    """Run the search in a process of Ray."""
    os.chdir(folder)
    planted_search(SearchConfig.model_validate(settings), Unwatched())


class TuningService(Way):
    """Service, worker and MLflow server around one database."""

    def __init__(self, place: SearchPlace, parts: tuple[str, ...]) -> None:
        super().__init__(place)
        self._parts = parts
        self._service_port, self._tracking_port = free_port(), free_port()
        self._processes: dict[str, BaseProcess] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._num_jobs = 0
        for part in ("tracking", "service", "worker"):
            self._start(part)
        patiently(partial(_answers, f"http://{HOST}:{self._tracking_port}/health"))

    def begin(self, name: str) -> None:
        """Submit a job that no other is, twice, as a client does whose first request went unanswered."""
        self._num_jobs += 1
        # The limit is longer than any prompt, so it changes the identity and nothing else.
        config = self.place.config(name, max_prompt_tokens=1000 + self._num_jobs)
        settings = config.model_dump(mode="json", exclude_unset=True, exclude=set(OF_THE_SERVICE))
        self._job, again = (self._ask(lambda client: client.submit(SearchRequest(config=settings)).id) for _ in "12")
        if self._job != again:
            raise SearchError(f"one submission became two jobs: {self._job} and {again}")

    def is_over(self) -> bool:
        if not self._processes["worker"].is_alive():  # it ends by itself when it was taken for dead
            self._start("worker")
        return self._ask(lambda client: client.search(self._job).state).is_over

    def kill(self, chance: random.Random) -> str | None:
        part = chance.choice(self._parts)
        if part == "connection":
            return part if self._end_connection(chance) else None
        if part == "tracking":
            os.killpg(self._tracking.pid, signal.SIGKILL)
            self._tracking.wait()
        else:
            self._processes[part].kill()
            self._processes[part].join()
        self._start(part)
        return part

    def failure(self) -> str | None:
        job = self._ask(lambda client: client.search(self._job))
        return None if job.state == "finished" else f"{job.state}: {job.error}"

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()
        os.killpg(self._tracking.pid, signal.SIGKILL)
        self._tracking.wait()

    def experiment(self, name: str) -> str:
        return f"model-prompts-{self._job}"

    def records(self, name: str) -> Records:
        return finished_trials(self.place.storage_url, self.experiment(name), tuple(self.place.studies))

    def winner(self, name: str) -> Any:
        path = self.place.profile(self._job)
        path.write_text(self._ask(lambda client: client.result(self._job).profile), encoding="utf-8")
        return winner_of(path)

    def _start(self, part: str) -> None:
        folder = self.place.folder
        if part == "tracking":
            self._tracking = self._tracking_server()
            return
        if part == "service":
            work = partial(_serve, self.place.storage_url, folder, self._service_port)
        else:
            tracking = f"http://{HOST}:{self._tracking_port}"
            settings = WorkerSettings(self.place.storage_url, tracking, folder / "searches", "cpu", beat=BEAT_SECONDS)
            work = partial(_work, settings)
        self._processes[part] = self._context.Process(target=_quietly, args=(work, folder / f"{part}.txt"))
        self._processes[part].start()

    def _ask(self, request: Callable[[ServiceClient], T]) -> T:
        """Return the service's answer to a request, which is sent again while the service does not answer."""

        def answer() -> T:
            with ServiceClient(f"http://{HOST}:{self._service_port}") as client:
                return request(client)

        return patiently(answer)

    def _end_connection(self, chance: random.Random) -> bool:
        engine = sa.create_engine(self.place.storage_url, poolclass=sa.pool.NullPool)
        query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        with engine.begin() as connection:
            pids = sorted(row[0] for row in connection.execute(sa.text(query)))
            if pids:
                connection.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": chance.choice(pids)})
        return bool(pids)

    def _tracking_server(self) -> subprocess.Popen[bytes]:
        folder = self.place.folder
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", self.place.tracking_url]
        command += ["--port", str(self._tracking_port), "--workers", "1"]
        command += ["--artifacts-destination", str(folder / "artefacts")]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (folder / "tracking.txt").open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, cwd=folder, env={**os.environ, **quiet}, start_new_session=True
            )


def _serve(database: str, folder: Path, port: int) -> None:
    allowed = Allowed([str(folder / "model")], [str(folder / "prompts.jsonl")])
    app = create_service(Jobs(database), ServiceSettings(allowed, folder / "searches"))
    uvicorn.run(app, port=port, log_level="error")


def _work(settings: WorkerSettings) -> None:
    torch.set_num_threads(1)
    SearchWorker(settings, run=partial(run_job, prices=planted_prices())).run()


def _quietly(work: Callable[[], None], said: Path) -> None:
    """Do the work of a process, with its output in a file."""
    with said.open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    work()


def _answers(address: str) -> None:
    try:
        urllib.request.urlopen(address, timeout=10).close()
    except (urllib.error.URLError, OSError) as cause:
        raise ServiceError(str(cause)) from None


def patiently(call: Callable[[], T]) -> T:
    """Return what `call` returns, called again for as long as the other side is away. Raises `SearchError` at the end."""
    end = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            return call()
        except ServiceError as refusal:
            if time.monotonic() > end:
                raise SearchError(f"no answer within {ANSWER_SECONDS:.0f} s: {refusal}") from None
            time.sleep(POLL_SECONDS)


@contextmanager
def _alone(place: SearchPlace) -> Iterator[Way]:
    yield Processes(replace(place, short_trials=None), 1)


@contextmanager
def _two_on_sqlite(place: SearchPlace) -> Iterator[Way]:
    yield Processes(place, 2)


@contextmanager
def _eight_on_postgresql(place: SearchPlace) -> Iterator[Way]:
    with postgres() as url:
        yield Processes(replace(place, storage=url), 8)


@contextmanager
def _ray(place: SearchPlace) -> Iterator[Way]:
    yield OnRay(place)


@contextmanager
def _service(place: SearchPlace) -> Iterator[Way]:
    storage = f"sqlite:///{place.folder / 'service.db'}"
    yield TuningService(replace(place, storage=storage), ("worker", "service", "tracking"))


@contextmanager
def _service_on_postgresql(place: SearchPlace) -> Iterator[Way]:
    with postgres() as url:
        yield TuningService(replace(place, storage=url), ("worker", "service", "tracking", "connection"))


WAYS = {
    "alone": _alone,
    "two on SQLite": _two_on_sqlite,
    "eight on PostgreSQL": _eight_on_postgresql,
    "ray": _ray,
    "service": _service,
    "service on PostgreSQL": _service_on_postgresql,
}


def killed_searches(
    way: Way, wanted: tuple[Records, Any], most_seconds: float, num_kills: int, kills_each: int, chance: random.Random
) -> tuple[list[CheckOutcome], Counter[str]]:
    """Run searches until there were `num_kills` kills, at most `kills_each` of one search; return what went wrong.

    Moments are drawn up to `most_seconds` after the kill before.
    """
    kills, ends, killed = CheckOutcome("kills"), CheckOutcome("searches"), Counter[str]()
    while kills.num_cases < num_kills:
        name = f"killed-{ends.num_cases}"
        known: Records = {}
        most = min(num_kills, kills.num_cases + kills_each)
        way.begin(name)
        while kills.num_cases < most and not _over_within(way, chance.uniform(0.0, most_seconds)):
            if (part := way.kill(chance)) is not None:
                found = way.records(name)
                kills.count(changed(known, found), of=f"{name}, {part}")
                killed[part] += 1
                known = found
        problem = _hanging(way, name) or way.failure()
        if problem is None:
            records = way.records(name)
            problem = changed(known, records) or difference(
                records, way.winner(name), *wanted, way.place.storage_url, way.place.tracking_url, way.experiment(name)
            )
        ends.count(problem, of=name)
        if problem is not None:
            break  # a search that hangs or fails would do so again
    return [kills, ends], killed


def _hanging(way: Way, name: str) -> str | None:
    """Wait until the search is over; return how it hung if no trial ended for long, or None."""
    before = -1
    while not _over_within(way, LIMIT_SECONDS):
        if (count := len(way.records(name))) == before:
            return f"no trial, and no end, within {LIMIT_SECONDS} s"
        before = count
    return None


def _over_within(way: Way, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (is_over := way.is_over()) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    return is_over


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("ways", nargs="*", default=list(WAYS), metavar="WAY", help=f"default: all ({', '.join(WAYS)})")
    parser.add_argument("--trials", type=int, default=200, help="trials of each search except `alone`")
    parser.add_argument("--kills", type=int, default=10, help="of each way")
    parser.add_argument("--kills-each", type=int, default=3, help="of one search at most: it must still end")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rows, failures = list[dict[str, Any]](), list[str]()
    undisturbed: dict[int | None, tuple[Records, Any, float]] = {}
    for name in args.ways:
        trials = None if name == "alone" else args.trials
        with TemporaryDirectory(prefix="sdtune-killed-") as folder, ExitStack() as stack:
            place = replace(SearchPlace.made(Path(folder)), short_trials=trials)
            if trials not in undisturbed:
                undisturbed[trials] = _undisturbed(place)
            records, winner, seconds = undisturbed[trials]
            way = stack.enter_context(WAYS[name](place))
            stack.callback(way.stop)
            start, chance = time.perf_counter(), random.Random(args.seed)
            found, killed = killed_searches(
                way, (records, winner), SHARE * seconds, args.kills, args.kills_each, chance
            )
            row: dict[str, Any] = {"way": name, "trials of a search": len(records), "undisturbed s": round(seconds, 1)}
            row |= {each.name: each.num_cases for each in found} | {"killed": ", ".join(sorted(killed))}
            failures += [f"{name}: {failure}" for each in found for failure in each.failures]
            row |= {"failures": sum(len(each.failures) for each in found), "s": round(time.perf_counter() - start, 1)}
            rows.append(row)
        show("Killed searches", rows)
        write(
            args.json, {"winner": {str(key): each[1] for key, each in undisturbed.items()}, "failures": failures}, rows
        )
    print("\n".join(failures))
    return int(bool(failures))


def _undisturbed(place: SearchPlace) -> tuple[Records, Any, float]:
    """Return the records, the winner and the seconds of a search that nothing disturbs. Raises `SearchError` if it fails."""
    first = replace(place, short_trials=1)  # makes the stores, and imports what is needed
    problem, start = first.finish("first"), time.perf_counter()
    if problem := problem or place.finish("undisturbed"):
        raise SearchError(f"the undisturbed search failed: {problem}")
    return place.records("undisturbed"), place.winner("undisturbed"), time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
