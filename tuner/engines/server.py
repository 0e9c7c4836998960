"""An engine as a process of its own on the loopback interface: started, waited for, asked over HTTP, and stopped in any case."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tuner.engines import guard
from tuner.errors import EngineError

if TYPE_CHECKING:
    from tuner.engines.contract import EngineProgram, Launch, Served, ServerSettings
    from tuner.export.plan import Plan

HOST = "127.0.0.1"
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(?P<value>[^\s]+)")
"""A line of the Prometheus text format: name, labels, value."""
REQUEST_SECONDS = 600.0
POLL_SECONDS = 0.2
LOG_LINES = 5
EXCEPTION = re.compile(r"(?:^|\] )((?:\w+\.)*\w+(?:Error|Exception): .+)", re.MULTILINE)
"""A line in which a traceback ends, also where a logger has put a prefix before each line."""


def free_port() -> int:
    """Return a port that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Client:
    """Client of one engine. Proxies of the environment do not apply."""

    port: int
    title: str

    def is_healthy(self) -> bool:
        """Return whether `/health` answers with status 200; a server that loads answers another, or not at all."""
        try:
            return self._ask("GET", "/health", None, seconds=5.0)[0] == 200
        except (OSError, HTTPException):
            return False

    def counters(self) -> dict[str, float]:
        """Return the values of `/metrics` by name, summed over labels."""
        return parse_counters(self._answer("GET", "/metrics", None))

    def post(self, path: str, document: Mapping[str, Any]) -> Any:
        """Post a JSON document and return the JSON of the answer."""
        text = self._answer("POST", path, document)
        try:
            return json.loads(text)
        except ValueError:
            raise EngineError(f"{self.title} answered {path} with what is no JSON: {text[:200]!r}") from None

    def _answer(self, method: str, path: str, document: Mapping[str, Any] | None) -> str:
        try:
            status, text = self._ask(method, path, document, REQUEST_SECONDS)
        except (OSError, HTTPException) as cause:
            raise EngineError(f"{self.title} does not answer {path}: {cause or type(cause).__name__}") from None
        if status != 200:
            raise EngineError(f"{self.title} answered {path} with status {status}: {text[:300]}")
        return text

    def _ask(self, method: str, path: str, document: Mapping[str, Any] | None, seconds: float) -> tuple[int, str]:
        connection = HTTPConnection(HOST, self.port, timeout=seconds)
        try:
            body = None if document is None else json.dumps(document)
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        finally:
            connection.close()


def parse_counters(text: str) -> dict[str, float]:
    """Return the values of the Prometheus text format by name, summed over labels."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if found := SAMPLE.match(line):
            values[found["name"]] = values.get(found["name"], 0.0) + float(found["value"])
    return values


@contextmanager
def serving(launch: Launch, client: Client, log: Path, *, start_seconds: float) -> Iterator[Client]:
    """Start an engine, wait until it is healthy, and yield the client; the process has ended when the context has.

    Raises `EngineError`, with the reason in its log, if it ends early or does not answer within `start_seconds`.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, *launch.command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **launch.environment},
            start_new_session=True,  # Ctrl-C reaches us alone, and the engine through us
        )
    try:
        _wait_until_healthy(process, client, log, start_seconds)
        yield client
    finally:
        _stop(process)


def served(
    program: EngineProgram, plan: Plan | Served, settings: ServerSettings, flags: Sequence[str], logs: Path
) -> AbstractContextManager[Client]:
    """Return a server of the export with these flags of a draft, or without any; it runs while the context does, and logs there."""
    torch.cuda.empty_cache()  # the server can use the GPU's memory that torch only keeps
    port = free_port()
    launch = program.launch(plan, settings, port, flags)
    return serving(launch, Client(port, program.title), logs / f"{port}.log", start_seconds=program.start_seconds)


def _wait_until_healthy(process: subprocess.Popen[bytes], client: Client, log: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not client.is_healthy():
        if (status := process.poll()) is not None:
            raise EngineError(f"{client.title} ended with status {status} before it answered: {reason_in(log)}")
        if time.monotonic() > end:
            raise EngineError(f"{client.title} did not answer within {seconds:.0f} s: {reason_in(log)}")
        time.sleep(POLL_SECONDS)


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None, "it was opened as a pipe"
    process.stdin.close()
    try:
        process.wait(2 * guard.PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def reason_in(log: Path) -> str:
    """Return the first exception in a log, from which others follow, with the last one, or else the last lines as one."""
    text = log.read_text(encoding="utf-8", errors="replace")
    if found := EXCEPTION.findall(text):
        return " | ".join(dict.fromkeys((found[0].strip(), found[-1].strip())))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-LOG_LINES:]) or "it wrote nothing"


def output_of(command: list[str], title: str) -> str:
    """Return what a command writes, on either stream; raise `EngineError` if it fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise EngineError(f"{title} cannot be run: {cause}") from None
    if done.returncode:
        raise EngineError(
            f"{title} cannot be run: {command[0]} ended with status {done.returncode}: {done.stderr[-300:]}"
        )
    return done.stdout + done.stderr
