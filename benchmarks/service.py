"""Does the tuning service lose anything when its parts are killed, and what does its storage bear? Exit status 1 if it does.

Kills: jobs with planted costs are submitted over HTTP. At random moments a worker, the service, the MLflow server or, with
PostgreSQL, one of their connections is killed (SIGKILL) and started again. No finished trial may be lost or doubled, no run in
MLflow left open, and each job must end with the winner of an undisturbed one.

Load: 1, 2, 4 ... processes share one Optuna study of trials that measure nothing: the cost of storing a trial, and trials a second.

Watchers: thousands of clients ask for the events of one job at the same time. Each must be served, or be told that the service is
busy, and the service must answer as soon as they have gone. On SQLite only.

PostgreSQL needs the extra `postgres` and the server's programs. A number of 0 leaves a part out.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import optuna
import sqlalchemy as sa
import torch
import uvicorn

from benchmarks.postgres import postgres
from benchmarks.results import show, write
from benchmarks.serving import free_port
from benchmarks.small_search import (
    CheckOutcome,
    Records,
    SearchPlace,
    changed,
    finished_trials,
    planted_prices,
    tracked_runs,
    unlike,
    untrue,
    winner_of,
)
from benchmarks.task import arguments
from tuner.errors import ConfigError, SearchError
from tuner.service.admission import OF_THE_SERVICE, Allowed
from tuner.service.app import ServiceSettings, create_service
from tuner.service.client import ServiceClient
from tuner.service.contract import JobState, SearchRequest, ServiceError
from tuner.service.jobs import Jobs
from tuner.service.worker import SearchWorker, WorkerSettings, run_job

T = TypeVar("T")
HOST = "127.0.0.1"
BEAT_SECONDS = 1.0
"""Of the workers: a dead one of this machine is found at the next beat."""
POLL_SECONDS, ANSWER_SECONDS, JOB_SECONDS = 0.2, 900.0, 1800.0
"""Limits of a busy machine: for a request that is sent until it is answered, and for a job."""
SHARE = 0.5
"""Longest time between two kills, as a share of an undisturbed job: most jobs meet several."""
NUM_PROMPTS, LOAD_SECONDS = 4, 7200.0
AT_ONCE, STATUS_SECONDS, SPARE_FILES = 500, 60.0, 200
"""Connections that are opened at the same moment, the longest wait for their status, and files beside them."""


class ServiceParts:
    """Service, worker and MLflow server around one database. A part that was killed is started again, as a supervisor would."""

    def __init__(self, place: SearchPlace, database: str) -> None:
        self.place, self.database = place, database
        self.names = ["worker", "service", "tracking", *(["connection"] if database.startswith("postgresql") else [])]
        self.tracking_store = f"sqlite:///{place.database('tracking')}"
        self._service_port, self._tracking_port = free_port(), free_port()
        self._processes: dict[str, BaseProcess] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])

    def start(self) -> None:
        for name in ("tracking", "service", "worker"):
            self.restart(name)
        patiently(partial(_answers, f"http://{HOST}:{self._tracking_port}/health"))

    def kill(self, name: str, chance: random.Random) -> bool:
        """Kill a part, or have PostgreSQL end one of several connections. Return False if there was none to kill."""
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
        """Start a part; a connection, its owner opens again."""
        if name == "connection":
            return
        if name == "tracking":
            self._tracking = self._tracking_server()
            return
        folder = self.place.folder
        if name == "service":
            work = partial(_serve, self.database, folder, self._service_port)
        else:
            tracking = f"http://{HOST}:{self._tracking_port}"
            settings = WorkerSettings(self.database, tracking, folder / "searches", "cpu", beat=BEAT_SECONDS)
            work = partial(_work, settings)
        self._processes[name] = self._context.Process(target=_quietly, args=(work, folder / f"{name}.txt"))
        self._processes[name].start()

    def revive(self) -> None:
        """Start a worker that ended by itself."""
        if not self._processes["worker"].is_alive():
            self.restart("worker")

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()
        os.killpg(self._tracking.pid, signal.SIGKILL)
        self._tracking.wait()

    def ask(self, request: Callable[[ServiceClient], T]) -> T:
        """Return the service's answer to a request, which is sent again while the service does not answer."""

        def answer() -> T:
            with ServiceClient(f"http://{HOST}:{self._service_port}") as client:
                return request(client)

        return patiently(answer)

    def _end_connection(self, chance: random.Random) -> bool:
        engine = sa.create_engine(self.database, poolclass=sa.pool.NullPool)
        query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        with engine.begin() as connection:
            pids = sorted(row[0] for row in connection.execute(sa.text(query)))
            if pids:
                connection.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": chance.choice(pids)})
        return bool(pids)

    def _tracking_server(self) -> subprocess.Popen[bytes]:
        folder = self.place.folder
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", self.tracking_store]
        command += ["--port", str(self._tracking_port), "--workers", "1"]
        command += ["--artifacts-destination", str(folder / "artefacts")]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        environment = {**os.environ, **quiet}
        with (folder / "tracking.txt").open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, cwd=folder, env=environment, start_new_session=True
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


class KilledJobs:
    """Jobs of one service, each compared with an undisturbed one."""

    def __init__(self, parts: ServiceParts, chance: random.Random) -> None:
        self._parts, self._chance = parts, chance
        self.kills, self.ends = CheckOutcome("kills"), CheckOutcome("jobs whose parts were killed")
        self.killed: Counter[str] = Counter()
        self._num_jobs, self._seconds, self._wanted = 0, 0.0, None
        self._records: Records = {}

    def undisturbed(self) -> None:
        """Run a job that the others are compared with. Raises `SearchError` if it fails."""
        for _ in ("imports what is needed", "is timed"):
            start = time.perf_counter()
            job = self._submit()
            if (problem := self._waited(job)) is not None:
                raise SearchError(f"the undisturbed job failed: {problem}")
        self._seconds = time.perf_counter() - start
        self._records, self._wanted = self._finished(job), self._winner(job)

    def disturbed(self, num_kills: int) -> None:
        """Run a job, and kill parts until it ends or there were `num_kills` kills."""
        job, known = self._submit(), dict[tuple[str, int], Any]()
        while self.kills.num_cases < num_kills:
            self._pause(self._chance.uniform(0.0, SHARE * self._seconds), job)
            if self._state(job).is_over:
                break
            name = self._chance.choice(self._parts.names)
            if not self._parts.kill(name, self._chance):
                continue
            found = self._finished(job)
            self.kills.count(changed(known, found), of=f"{job}, {name}")
            self.killed[name] += 1
            known = dict(found)
            self._parts.restart(name)
        self.ends.count(self._waited(job) or self._wrong(job, known), of=job)

    def _submit(self) -> str:
        """Submit a job that no other is, twice, as a client does whose first request went unanswered."""
        self._num_jobs += 1
        # The limit is longer than any prompt, so it changes the identity and nothing else.
        config = self._parts.place.config("job", max_prompt_tokens=1000 + self._num_jobs)
        settings = config.model_dump(mode="json", exclude_unset=True, exclude=set(OF_THE_SERVICE))
        first, again = (self._parts.ask(lambda client: client.submit(SearchRequest(config=settings)).id) for _ in "12")
        if first != again:
            raise SearchError(f"one submission became two jobs: {first} and {again}")
        return first

    def _pause(self, seconds: float, job: str) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._state(job).is_over:
            self._parts.revive()
            time.sleep(min(POLL_SECONDS, seconds))

    def _waited(self, job: str) -> str | None:
        """Wait until the job is over; return what went wrong."""
        end = time.monotonic() + JOB_SECONDS
        while not (state := self._state(job)).is_over:
            if time.monotonic() > end:
                return f"no end after {JOB_SECONDS:.0f} s"
            self._parts.revive()
            time.sleep(POLL_SECONDS)
        if state is JobState.FINISHED:
            return None
        return f"{state}: {self._parts.ask(lambda client: client.search(job).error)}"

    def _state(self, job: str) -> JobState:
        return self._parts.ask(lambda client: client.search(job).state)

    def _wrong(self, job: str, known: Records) -> str | None:
        """Return how a finished job differs from an undisturbed one, or None."""
        records = self._finished(job)
        runs = tracked_runs(self._parts.tracking_store, self._experiment(job))
        problem = changed(known, records) or unlike(records, self._records) or untrue(*runs, records)
        if problem is None and (winner := self._winner(job)) != self._wanted:
            problem = f"another winner: {winner}, undisturbed {self._wanted}"
        return problem

    def _winner(self, job: str) -> Any:
        path = self._parts.place.folder / f"{job}.yaml"
        path.write_text(self._parts.ask(lambda client: client.result(job).profile), encoding="utf-8")
        return winner_of(path)

    def _finished(self, job: str) -> Records:
        return finished_trials(self._parts.database, self._experiment(job))

    def _experiment(self, job: str) -> str:
        return f"model-prompts-{job}"


def killed_jobs(database: str, folder: Path, num_kills: int, seed: int) -> KilledJobs:
    """Kill parts `num_kills` times at random moments of running jobs; return what went wrong."""
    parts = ServiceParts(SearchPlace.made(folder), database)
    try:
        parts.start()
        jobs = KilledJobs(parts, random.Random(seed))
        jobs.undisturbed()
        while jobs.kills.num_cases < num_kills:
            jobs.disturbed(num_kills)
    finally:
        parts.stop()
    return jobs


def storage_of(database: str) -> optuna.storages.RDBStorage:
    options = {"connect_args": {"timeout": 600}} if database.startswith("sqlite") else {}
    return optuna.storages.RDBStorage(database, engine_kwargs=options)


def load_of(database: str, num_trials: int, num_workers: int) -> dict[str, Any]:
    """Let processes run `num_trials` trials together, in a study of their own; return a row."""
    name = f"load-{num_workers}"
    optuna.create_study(storage=storage_of(database), study_name=name, direction="maximize")
    context = multiprocessing.get_context("forkserver")
    barrier, results = context.Barrier(num_workers + 1), context.Queue()
    shares = [num_trials // num_workers + (worker < num_trials % num_workers) for worker in range(num_workers)]
    arguments_of = [(database, name, share, barrier, results) for share in shares]
    processes = [context.Process(target=load_worker, args=each) for each in arguments_of]
    for process in processes:
        process.start()
    barrier.wait(ANSWER_SECONDS)  # broken by a process that failed
    start, before = time.perf_counter(), _stored_bytes(database)
    used = [results.get(timeout=LOAD_SECONDS) for _ in processes]
    seconds = time.perf_counter() - start
    for process in processes:
        process.join()
    if failed := [each for each in used if isinstance(each, str)]:
        raise SearchError(f"{len(failed)} of {num_workers} processes failed: {failed[0]}")
    trials = optuna.load_study(storage=storage_of(database), study_name=name).trials
    numbers = Counter(trial.number for trial in trials if trial.state is optuna.trial.TrialState.COMPLETE)
    return {
        "processes": num_workers,
        "trials": num_trials,
        "trials/s": num_trials / seconds,
        "processor ms/trial": 1000 * sum(used) / num_trials,
        "bytes/trial": (_stored_bytes(database) - before) / num_trials,
        "lost or doubled": sum(numbers[number] != 1 for number in range(num_trials)) + len(numbers) - num_trials,
    }


def load_worker(database: str, name: str, num_trials: int, barrier: Barrier, results: Any) -> None:
    """Run trials as a search stores them; answer with the processor seconds, or with what went wrong."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def objective(trial: optuna.Trial) -> float:
        block, length = trial.suggest_int("block", 0, 30), trial.suggest_int("length", 1, 8)
        ratio = 1.0 + block / 100 + length / 1000
        for prompt in range(NUM_PROMPTS):
            trial.report(ratio, prompt)
        trial.set_user_attr("record", "x" * 1000)
        return ratio

    try:
        study = optuna.load_study(
            storage=storage_of(database), study_name=name, sampler=optuna.samplers.RandomSampler(seed=os.getpid())
        )
        barrier.wait(ANSWER_SECONDS)
        before = sum(os.times()[:2])
        study.optimize(objective, n_trials=num_trials)
        results.put(sum(os.times()[:2]) - before)
    except Exception as failure:  # told to the process that waits for the answer, which raises
        barrier.abort()
        results.put(f"{type(failure).__name__}: {failure}")


def _stored_bytes(database: str) -> int:
    if database.startswith("sqlite"):
        path = Path(database.removeprefix("sqlite:///"))
        return sum(each.stat().st_size for each in (path, Path(f"{path}-wal")) if each.exists())
    with sa.create_engine(database, poolclass=sa.pool.NullPool).connect() as connection:
        return int(connection.execute(sa.text("SELECT pg_database_size(current_database())")).scalar_one())


def watched(database: str, folder: Path, num_clients: int) -> tuple[dict[str, Any], list[str]]:
    """Start a service, submit a job that no worker runs, and let clients watch it; return a row, and what went wrong."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_clients > limit - SPARE_FILES:
        raise ConfigError(f"--watchers {num_clients}: this process may open {limit} files: raise `ulimit -n`")
    SearchPlace.made(folder)
    port, model, data = free_port(), str(folder / "model"), str(folder / "prompts.jsonl")
    command = [sys.executable, "-m", "tuner.cli.main", "service", "--port", str(port), "--database", database]
    command += ["--folder", str(folder / "searches"), "--allow-model", model, "--allow-dataset", data]
    with (folder / "service.txt").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)

    def ask(request: Callable[[ServiceClient], T]) -> T:
        with ServiceClient(f"http://{HOST}:{port}") as client:
            return request(client)

    try:
        patiently(partial(ask, lambda client: client.workers()))
        job = ask(lambda client: client.submit(SearchRequest(config={"model": model, "dataset": data})).id)
        before = _megabytes(process.pid)
        statuses, served, other = asyncio.run(_crowd(port, job, num_clients))
        crowded, start = _megabytes(process.pid), time.monotonic()
        patiently(partial(ask, lambda client: client.search(job)))
        calm = time.monotonic() - start
    finally:
        process.kill()
        process.wait()
    row = {"watchers": num_clients, **statuses, "served at the end": served, "good answer after s": calm}
    wrong = [f"watchers whose answer was {each}: {statuses[each]}" for each in statuses if each not in ("200", "503")]
    wrong += [] if other in ("200", "503") else ["no other client was answered meanwhile"]
    return {**row, "MB before": before, "MB after": crowded}, wrong


async def _crowd(port: int, job: str, num_clients: int) -> tuple[Counter[str], int, str]:
    """Open connections that read the status only; return the statuses, how many are served at the end, and another one's status."""
    request = f"GET /v1/searches/{job}/events HTTP/1.1\r\nHost: {HOST}:{port}\r\nAccept: text/event-stream\r\n\r\n"
    open_ones: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def status() -> str:
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                reader, writer = await asyncio.open_connection(HOST, port)
                open_ones.append((reader, writer))
                writer.write(request.encode())
                line = (await reader.readline()).split()
        except TimeoutError:
            return "silent"
        except OSError:
            return "closed"
        return line[1].decode() if len(line) > 1 else "closed"

    statuses: Counter[str] = Counter()
    for first in range(0, num_clients, AT_ONCE):
        statuses.update(await asyncio.gather(*(status() for _ in range(min(AT_ONCE, num_clients - first)))))
    other = await status()
    served = min(statuses["200"], sum(not reader.at_eof() for reader, _ in open_ones))
    for _, writer in open_ones:
        writer.transport.abort()
    return statuses, served, other


def _megabytes(pid: int) -> float:
    """Return the resident memory of a process, by Linux."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 1e6


@contextmanager
def database_of(kind: str) -> Iterator[tuple[str, Path]]:
    """Yield the address of an empty database, and a folder."""
    with TemporaryDirectory(prefix="sdtune-service-") as name:
        if kind == "sqlite":
            yield f"sqlite:///{Path(name) / 'service.db'}", Path(name)
        else:
            with postgres() as url:
                yield url, Path(name)


def main() -> int:
    parser = arguments(__doc__)
    kinds = ("sqlite", "postgresql")
    parser.add_argument("--databases", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--kills", type=int, default=50, help="on each database")
    parser.add_argument("--load-trials", type=int, default=1000, help="of each load, on each database")
    parser.add_argument("--sqlite-workers", type=int, default=8, help="most processes of a load")
    parser.add_argument("--postgresql-workers", type=int, default=16)
    parser.add_argument("--watchers", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    document: dict[str, Any] = {"failures": []}
    failures: list[str] = document["failures"]
    for kind in args.databases:
        if args.kills:
            with database_of(kind) as (database, folder):
                jobs = killed_jobs(database, folder, args.kills, args.seed)
            failures += [*jobs.kills.failures, *jobs.ends.failures]
            document[f"{kind}, kills"] = [jobs.kills.row | dict(jobs.killed), jobs.ends.row]
            show(f"{kind}: kills", document[f"{kind}, kills"])
            write(args.json, document)
        if args.load_trials:
            most = args.sqlite_workers if kind == "sqlite" else args.postgresql_workers
            with database_of(kind) as (database, _):
                counts = sorted({most, *(1 << power for power in range(most.bit_length()))} - {0})
                rows = [load_of(database, args.load_trials, count) for count in counts if count <= most]
            document[f"{kind}, load"] = rows
            failures += [
                f"{kind}: {row['lost or doubled']} trials lost or doubled" for row in rows if row["lost or doubled"]
            ]
            show(f"{kind}: short trials", rows)
            write(args.json, document)
    if args.watchers:
        with database_of("sqlite") as (database, folder):
            row, wrong = watched(database, folder, args.watchers)
        document["watchers"] = row
        failures += wrong
        show("Watchers of one job", [row])
        write(args.json, document)
    print("\n".join(failures))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
