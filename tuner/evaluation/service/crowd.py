"""Thousands of clients that watch one job at the same time: how many are served, and whether the service goes on."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import ConfigError, SearchError
from tuner.evaluation.hardening.priced_search import SearchPlace
from tuner.evaluation.serving.processes import free_port
from tuner.progress import Progress
from tuner.service.client import ServiceClient
from tuner.service.contract import SearchRequest, ServiceError

HOST = "127.0.0.1"
AT_ONCE = 500
"""Connections that are opened at the same moment."""
ANSWER_SECONDS = 60.0
"""Longest wait for the status of a connection."""
CALM_SECONDS = 60.0
"""After the clients have gone, the service must answer within this time."""
SPARE_FILES = 200
CLOSED, SILENT = "closed", "silent"


@dataclass(frozen=True)
class Crowd:
    """What became of the connections."""

    num_clients: int
    statuses: Counter[str]
    """HTTP status by number of clients; also clients that were closed without one, or got none in time."""
    served: int
    """Clients that were being served at the end."""
    answered_meanwhile: bool
    """True if another client was told something, if only that the service is busy."""
    calm_seconds: float
    """From the moment at which all clients went away to the service's next good answer."""
    megabytes: tuple[float, float]
    """Resident memory of the service before, and with all clients."""

    @property
    def failures(self) -> list[str]:
        """What went wrong."""
        wrong = [status for status in self.statuses if status not in ("200", "503")]
        found = [f"clients whose answer was {status}: {self.statuses[status]}" for status in wrong]
        if not self.answered_meanwhile:
            found.append("no other client was answered meanwhile")
        return found

    @property
    def facts(self) -> dict[str, Any]:
        """All figures."""
        return {**vars(self), "statuses": dict(self.statuses), "failures": self.failures}


def crowd(database: str, folder: Path, num_clients: int, progress: Progress) -> Crowd:
    """Start a service, submit a job that no worker runs, and let `num_clients` watch it. Raises `ConfigError` for too many."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_clients > limit - SPARE_FILES:
        raise ConfigError(f"--watchers {num_clients}: this process may open {limit} files: raise `ulimit -n`")
    SearchPlace.made(folder)
    with _service(database, folder) as (pid, port):
        config = {"model": str(folder / "model"), "dataset": str(folder / "prompts.jsonl")}
        with ServiceClient(f"http://{HOST}:{port}") as client:
            job = client.submit(SearchRequest(config=config)).id
        return asyncio.run(_watch(pid, port, job, num_clients, progress))


async def _watch(pid: int, port: int, job: str, num_clients: int, progress: Progress) -> Crowd:
    before = _megabytes(pid)
    request = (
        f"GET /v1/searches/{job}/events HTTP/1.1\r\nHost: {HOST}:{port}\r\nAccept: text/event-stream\r\n\r\n".encode()
    )
    progress.stage("watchers", num_clients)
    clients: list[_Client] = []
    for first in range(0, num_clients, AT_ONCE):
        group = [_Client(port, request) for _ in range(min(AT_ONCE, num_clients - first))]
        await asyncio.gather(*(client.open() for client in group))
        clients += group
        for _ in group:
            progress.advance()
    other = _Client(port, request)
    await other.open()
    crowded = _megabytes(pid)
    served = sum(client.status == "200" and not client.is_closed for client in clients)
    for client in (*clients, other):
        client.close()
    return Crowd(
        num_clients,
        Counter(client.status for client in clients),
        served,
        other.status in ("200", "503"),
        await asyncio.to_thread(_calm, port, job),
        (before, crowded),
    )


class _Client:
    """A connection that asks for the events of a job, and reads the status only."""

    def __init__(self, port: int, request: bytes) -> None:
        self._port, self._request = port, request
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.status = SILENT

    async def open(self) -> None:
        """Connect, ask, and wait for the status."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                self._reader, self._writer = await asyncio.open_connection(HOST, self._port)
                self._writer.write(self._request)
                line = (await self._reader.readline()).split()
                self.status = line[1].decode() if len(line) > 1 else CLOSED
        except TimeoutError:
            self.status = SILENT
        except OSError:
            self.status = CLOSED

    @property
    def is_closed(self) -> bool:
        """True if the service has ended the connection."""
        return self._reader is None or self._reader.at_eof()

    def close(self) -> None:
        """Go away without a word."""
        if self._writer is not None:
            self._writer.transport.abort()


def _calm(port: int, job: str) -> float:
    """Return the seconds until the service answers again; raise `SearchError` if it does not."""
    start = time.monotonic()
    while True:
        try:
            with ServiceClient(f"http://{HOST}:{port}") as client:
                client.search(job)
            return time.monotonic() - start
        except ServiceError as refusal:
            if time.monotonic() - start > CALM_SECONDS:
                raise SearchError(f"the service does not answer after its watchers have gone: {refusal}") from None
            time.sleep(0.2)


@contextmanager
def _service(database: str, folder: Path) -> Iterator[tuple[int, int]]:
    """Run `sdtune service` for a while; its limits are those of every service."""
    port = free_port()
    command = [sys.executable, "-m", "tuner.cli.main", "service", "--port", str(port), "--database", database]
    command += ["--folder", str(folder / "searches")]
    command += ["--allow-model", str(folder / "model"), "--allow-dataset", str(folder / "prompts.jsonl")]
    with (folder / "service.txt").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        _started(process, port, folder / "service.txt")
        yield process.pid, port
    finally:
        process.kill()
        process.wait()


def _started(process: subprocess.Popen[bytes], port: int, said: Path) -> None:
    end = time.monotonic() + 10 * CALM_SECONDS
    while True:
        try:
            with ServiceClient(f"http://{HOST}:{port}") as client:
                client.workers()
            return
        except ServiceError as refusal:
            if process.poll() is not None or time.monotonic() > end:
                said_at_last = said.read_text(encoding="utf-8", errors="replace")[-1000:]
                raise SearchError(f"the service did not start: {refusal}\n{said_at_last}") from None
            time.sleep(0.2)


def _megabytes(pid: int) -> float:
    """Return the resident memory of a process, by Linux."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 1e6
