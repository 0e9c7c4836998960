"""Servers as processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tuner.errors import ConfigError

START_SECONDS = 300
STOP_SECONDS = 60


@dataclass(frozen=True)
class RunningServer:
    """A server that answers `/health`."""

    name: str
    url: str
    model: str
    """Name that clients give."""

    def metrics(self) -> dict[str, float]:
        """Return its metrics: each name with its labels, and the value."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}

    def resident_bytes(self) -> float:
        """Return the memory of its process."""
        return self.metrics()["process_resident_memory_bytes"]


def own_command(profile: Path, model: str, port: int, *arguments: str) -> list[str]:
    """Return the command of `sdtune serve`."""
    command = [sys.executable, "-m", "tuner.cli.main", "serve", str(profile), "--port", str(port)]
    return [*command, "--served-model-name", model, *arguments]


def stock_command(folder: str, port: int) -> list[str]:
    """Return the command of `transformers serve`, which decodes in float32 on a CPU."""
    program = Path(sys.executable).with_name("transformers")
    return [
        str(program),
        "serve",
        folder,
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--dtype",
        "float32",
        "--device",
        "cpu",
    ]


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(
    name: str, command: Sequence[str], port: int, model: str, log: Path, threads: int | None
) -> Iterator[RunningServer]:
    """Run a server while the context lasts; its output goes to `log`. Raises `ConfigError` if it does not start."""
    limits = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **limits})
    try:
        server = RunningServer(name, f"http://127.0.0.1:{port}", model)
        _wait(server, process, log)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(server: RunningServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise ConfigError(f"{server.name} does not start: see {log}")
