"""Does the tuning service stay well under thousands of watchers? Exit status 1 if it does not.

Clients ask for the events of one job at the same time. Each must be served, or be told that the service is busy, and the service
must answer as soon as they have gone.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.killed import patiently
from benchmarks.results import show, write
from benchmarks.small_search import SearchPlace
from benchmarks.task import arguments
from tuner.engines.contract import Launch
from tuner.engines.server import HOST, Client, free_port, serving
from tuner.errors import ConfigError
from tuner.service.client import ServiceClient
from tuner.service.contract import SearchRequest

AT_ONCE, STATUS_SECONDS, SPARE_FILES = 500, 60.0, 200
"""Connections that are opened at the same moment, the longest wait for their status, and files beside them."""
START_SECONDS = 300.0


def watched(folder: Path, num_clients: int) -> tuple[dict[str, Any], list[str]]:
    """Start a service, submit a job that no worker runs, and let clients watch it; return a row, and what went wrong."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_clients > limit - SPARE_FILES:
        raise ConfigError(f"--watchers {num_clients}: this process may open {limit} files: raise `ulimit -n`")
    SearchPlace.made(folder)
    port, model, data = free_port(), str(folder / "model"), str(folder / "prompts.jsonl")
    command = [sys.executable, "-m", "tuner.cli.main", "service", "--port", str(port)]
    command += ["--database", f"sqlite:///{folder / 'service.db'}", "--folder", str(folder / "searches")]
    command += ["--allow-model", model, "--allow-dataset", data]
    running = serving(
        Launch(tuple(command)), Client(port, "service"), folder / "service.txt", start_seconds=START_SECONDS
    )
    with running, ServiceClient(f"http://{HOST}:{port}") as client:
        job = client.submit(SearchRequest(config={"model": model, "dataset": data})).id
        before = _megabytes()
        statuses, served, other = asyncio.run(_crowd(port, job, num_clients))
        crowded, start = _megabytes(), time.monotonic()
        patiently(partial(client.search, job))
        calm = time.monotonic() - start
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


def _megabytes() -> float:
    """Return the resident memory of the service: of all that this process has started."""
    return sum(child.memory_info().rss for child in psutil.Process().children(recursive=True)) / 1e6


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--watchers", type=int, default=10_000)
    args = parser.parse_args()
    with TemporaryDirectory(prefix="sdtune-watchers-") as folder:
        row, failures = watched(Path(folder), args.watchers)
    show("Watchers of one job", [row])
    write(args.json, {"watchers": row, "failures": failures})
    print("\n".join(failures))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
