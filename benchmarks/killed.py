"""Is anything lost or doubled when processes of a search are killed at any moment? Exit status 1 if it is.

Searches with planted costs, as `benchmarks.small_search` makes them, run in each way that a user can run one. At random moments a
process of theirs is killed (SIGKILL) and, as a supervisor would, started again:

* `alone`: one process, trials in SQLite; a few trials, some by a study that derives each candidate from the one before
* `two on SQLite`: processes on one file that join one search
* `eight on PostgreSQL`: the same on a server that is started for it; its programs must be installed
* `ray`: `sdtune search --ray` on nodes of a cluster on this host; a node is killed, and another takes its place
* `service`: jobs over HTTP; a worker, the service, the MLflow server or, with PostgreSQL, a connection is killed

All but the first run --trials short trials of as many candidates, which are known beforehand: whatever process measures them in
whatever order, planted costs decide the winner. Each search must end with the winner of an undisturbed one, one result, and one run
in MLflow with one nested run a trial. No finished trial may be lost, doubled or changed, and none may be left open.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import optuna
import sqlalchemy as sa
import torch
import uvicorn

from benchmarks.postgres import postgres
from benchmarks.results import show, write
from benchmarks.small_search import (
    LIMIT_SECONDS,
    PRELOADED,
    Records,
    SearchPlace,
    difference,
    doubled,
    lost,
    num_results,
    planted_prices,
    winner_of,
)
from benchmarks.task import arguments
from tuner.engines.server import free_port
from tuner.errors import SearchError
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
KILLS_EACH, SHARE = 3, 0.3
"""Most kills of one search, which must still end; longest time between two, as a share of an undisturbed search."""


class Way(ABC):
    """A way to run one search at a time, by processes of which any may be killed."""

    def __init__(self, place: SearchPlace) -> None:
        self.place = place
        self.processes: dict[str, BaseProcess] = {}

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

    def stop(self) -> None:
        """Kill what still runs."""
        for process in self.processes.values():
            end(process)

    def experiment(self, name: str) -> str:
        return name

    def winner(self, name: str) -> Any:
        return self.place.winner(name)

    def records(self, name: str) -> Records:
        return self.place.records(self.experiment(name))


def end(process: BaseProcess) -> None:
    """Kill a process, and those that it started if it leads a group."""
    if process.is_alive() and process.pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()


class Commands(Way):
    """Processes that each run the same command on one storage."""

    def __init__(self, place: SearchPlace, count: int) -> None:
        super().__init__(place)
        self._count = count

    def begin(self, name: str) -> None:
        self._name = name
        texts = [f"{name}-{number}" for number in range(self._count)]
        self.processes = {said: self.place.start(name, said=said) for said in texts}

    def is_over(self) -> bool:
        return not any(each.is_alive() for each in self.processes.values())

    def kill(self, chance: random.Random) -> str | None:
        living = [said for said, each in self.processes.items() if each.is_alive()]
        if not living:
            return None
        said = chance.choice(living)
        end(self.processes[said])
        self.processes[said] = self.place.start(self._name, said=said)
        return "process"

    def failure(self) -> str | None:
        ended = [self.place.failure(said, each.exitcode) for said, each in self.processes.items()]
        return next(filter(None, ended), None)


class OnRay(Commands):
    """A command that searches on the nodes of a Ray cluster, all on this host."""

    NUM_NODES = 2

    def __init__(self, place: SearchPlace) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._nodes = [self._cluster.add_node(num_cpus=1) for _ in range(self.NUM_NODES)]
        super().__init__(replace(place, changes={"ray": self._cluster.address, "device": "cpu"}), 1)

    def kill(self, chance: random.Random) -> str | None:
        self._cluster.remove_node(self._nodes.pop(chance.randrange(len(self._nodes))), allow_graceful=False)
        self._nodes.append(self._cluster.add_node(num_cpus=1))
        return "node"

    def stop(self) -> None:
        super().stop()
        self._cluster.shutdown()


class TuningService(Way):
    """Service, worker and MLflow server around one database."""

    PARTS = ("tracking", "service", "worker")

    def __init__(self, place: SearchPlace) -> None:
        super().__init__(place)
        self._service_port, self._tracking_port = free_port(), free_port()
        self._num_jobs = 0
        for part in self.PARTS:
            self._start(part)
        patiently(partial(_answers, f"http://{HOST}:{self._tracking_port}/health"))

    def begin(self, name: str) -> None:
        """Submit a job that no other is, twice, as a client does whose first request went unanswered."""
        self._num_jobs += 1
        self._next_death = 0
        # The limit is longer than any prompt, so it changes the identity and nothing else.
        config = self.place.config(name, max_prompt_tokens=1000 + self._num_jobs)
        settings = config.model_dump(mode="json", exclude_unset=True, exclude=set(OF_THE_SERVICE))
        self._job, again = (self._ask(lambda client: client.submit(SearchRequest(config=settings)).id) for _ in "12")
        if self._job != again:
            raise SearchError(f"one submission became two jobs: {self._job} and {again}")

    def is_over(self) -> bool:
        if not self.processes["worker"].is_alive():  # it ends by itself when it was taken for dead
            self._start("worker")
        return self._ask(lambda client: client.search(self._job).state).is_over

    def kill(self, chance: random.Random) -> str | None:
        is_server = not self.place.storage_url.startswith("sqlite")
        part = chance.choice([*self.PARTS, *(["connection"] if is_server else [])])
        if part == "connection":
            return part if self._end_connection(chance) else None
        if part == "worker":
            # A search that a second worker dies with before it ends a trial is taken for deadly, and stopped.
            if (known := len(self.records(self._job))) < self._next_death:
                return None
            self._next_death = known + 2
        end(self.processes[part])
        self._start(part)
        return part

    def failure(self) -> str | None:
        job = self._ask(lambda client: client.search(self._job))
        return None if job.state == "finished" else f"{job.state}: {job.error}"

    def experiment(self, name: str) -> str:
        return f"model-prompts-{self._job}"

    def winner(self, name: str) -> Any:
        path = self.place.profile(name)
        path.write_text(self._ask(lambda client: client.result(self._job).profile), encoding="utf-8")
        return winner_of(path)

    def _start(self, part: str) -> None:
        folder, tracking = self.place.folder, f"http://{HOST}:{self._tracking_port}"
        work = {
            "tracking": partial(_track, self.place.tracking_url, folder, self._tracking_port),
            "service": partial(_serve, self.place.storage_url, folder, self._service_port),
            "worker": partial(_work, self.place.storage_url, folder, tracking),
        }
        self.processes[part] = self.place.process(part, work[part])

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


def _track(database: str, folder: Path, port: int) -> None:
    """Become an MLflow server, which leads a group of processes."""
    os.setsid()
    os.chdir(folder)
    options = ["--backend-store-uri", database, "--port", str(port), "--workers", "1"]
    options += ["--artifacts-destination", str(folder / "artefacts")]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    os.execve(sys.executable, [sys.executable, "-m", "mlflow", "server", *options], {**os.environ, **quiet})


def _serve(database: str, folder: Path, port: int) -> None:
    allowed = Allowed([str(folder / "model")], [str(folder / "prompts.jsonl")])
    app = create_service(Jobs(database), ServiceSettings(allowed, folder / "searches"))
    uvicorn.run(app, port=port, log_level="error")


def _work(database: str, folder: Path, tracking: str) -> None:
    torch.set_num_threads(1)
    settings = WorkerSettings(database, tracking, folder / "searches", "cpu", beat=BEAT_SECONDS)
    SearchWorker(settings, run=partial(run_job, prices=planted_prices())).run()


def _answers(address: str) -> None:
    try:
        urllib.request.urlopen(address, timeout=10).close()
    except (urllib.error.URLError, OSError) as cause:
        raise ServiceError(str(cause)) from None


def patiently(call: Callable[[], T]) -> T:
    """Return what `call` returns, called again for as long as the other side is away. Raises `SearchError` at the end."""
    limit = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            return call()
        except ServiceError as refusal:
            if time.monotonic() > limit:
                raise SearchError(f"no answer within {ANSWER_SECONDS:.0f} s: {refusal}") from None
            time.sleep(POLL_SECONDS)


def _on_postgres(make: Callable[[SearchPlace], Way]) -> Callable[[SearchPlace, ExitStack], Way]:
    return lambda place, stack: make(replace(place, storage=stack.enter_context(postgres())))


WAYS: dict[str, Callable[[SearchPlace, ExitStack], Way]] = {
    "alone": lambda place, stack: Commands(place, 1),
    "two on SQLite": lambda place, stack: Commands(place, 2),
    "eight on PostgreSQL": _on_postgres(lambda place: Commands(place, 8)),
    "ray": lambda place, stack: OnRay(place),
    "service": lambda place, stack: TuningService(replace(place, storage=f"sqlite:///{place.folder / 'service.db'}")),
    "service on PostgreSQL": _on_postgres(TuningService),
}


def killed_searches(
    way: Way, wanted: tuple[Records, Any], most_seconds: float, num_kills: int, chance: random.Random
) -> tuple[dict[str, Any], list[str]]:
    """Run searches until there were `num_kills` kills, at most `KILLS_EACH` of one; return a row, and what went wrong.

    Moments are drawn up to `most_seconds` after the kill before. A search that hangs or fails is the last: others would too.
    """
    counts, killed, failures = Counter[str](), Counter[str](), list[str]()
    while killed.total() < num_kills and not failures:
        name = f"killed-{counts['searches']}"
        known: Records = {}
        counts["searches"] += 1
        most = min(num_kills, killed.total() + KILLS_EACH)
        way.begin(name)
        while killed.total() < most and not _over_within(way, chance.uniform(0.0, most_seconds)):
            if (part := way.kill(chance)) is not None:
                killed[part] += 1
                before, known = known, way.records(name)
                counts["lost"] += len(lost(before, known))
        if (problem := _hanging(way, name) or way.failure()) is None:
            records, winner = way.records(name), way.winner(name)
            counts += Counter({"trials stored": len(records), "lost": len(lost(known, records))})
            counts += Counter({"doubled": len(doubled(records)), "same winner": int(winner == wanted[1])})
            stores = way.place.storage_url, way.place.tracking_url, way.experiment(name)
            counts["results"] += num_results(stores[0], stores[2])
            problem = difference(known, records, winner, *wanted, *stores)
        failures += [f"{name}: {problem}"] if problem else []
    columns = ("searches", "trials stored", "lost", "doubled", "results", "same winner")
    parts = ", ".join(f"{count} {part}" for part, count in sorted(killed.items()))
    return {"kills": parts, **{each: counts[each] for each in columns}, "failures": len(failures)}, failures


def _hanging(way: Way, name: str) -> str | None:
    """Wait until the search is over; return how it hung if no trial ended for long, or None."""
    before = -1
    while not _over_within(way, LIMIT_SECONDS):
        if (count := len(way.records(name))) == before:
            return f"no trial, and no end, within {LIMIT_SECONDS} s"
        before = count
    return None


def _over_within(way: Way, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while not (is_over := way.is_over()) and time.monotonic() < limit:
        time.sleep(POLL_SECONDS)
    return is_over


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("ways", nargs="*", default=list(WAYS), metavar="WAY", help=f"default: all ({', '.join(WAYS)})")
    parser.add_argument("--trials", type=int, default=200, help="trials of each search except `alone`")
    parser.add_argument("--kills", type=int, default=10, help="of each way")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    PRELOADED.extend(["tuner.service.app", "tuner.service.worker"])
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
            start, chance = time.perf_counter(), random.Random(args.seed)
            way = WAYS[name](place, stack)
            stack.callback(way.stop)
            row, wrong = killed_searches(way, (records, winner), SHARE * seconds, args.kills, chance)
            failures += [f"{name}: {each}" for each in wrong]
            row = {"way": name, "trials": len(records), "undisturbed s": round(seconds, 1), **row}
            rows.append({**row, "s": round(time.perf_counter() - start, 1)})
        show("Killed searches", rows)
        winners = {str(key): each[1] for key, each in undisturbed.items()}
        write(args.json, {"winner": winners, "failures": failures}, rows)
    print("\n".join(failures))
    return int(bool(failures))


def _undisturbed(place: SearchPlace) -> tuple[Records, Any, float]:
    """Return the records, the winner and the seconds of a search that nothing disturbs. Raises `SearchError` if it fails."""
    start = time.perf_counter()
    if problem := place.finish("undisturbed"):
        raise SearchError(f"the undisturbed search failed: {problem}")
    return place.records("undisturbed"), place.winner("undisturbed"), time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
