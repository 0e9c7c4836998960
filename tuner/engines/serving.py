"""An engine as a process of its own: started, waited for, and stopped in any case."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.engines import guard
from tuner.engines.contract import Launch
from tuner.engines.loopback import Client, free_port
from tuner.errors import EngineError

if TYPE_CHECKING:
    from tuner.engines.contract import EngineProgram, ServerSettings
    from tuner.export.plan import Plan

POLL_SECONDS = 0.2
LOG_LINES = 5


@contextmanager
def serving(launch: Launch, client: Client, log: Path, *, start_seconds: float) -> Iterator[Client]:
    """Start an engine, wait until it is healthy, and yield the client; the process has ended when the context has.

    Raises `EngineError`, with the last lines of its log, if it ends early or does not answer within `start_seconds`.
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
    program: EngineProgram, plan: Plan, settings: ServerSettings, flags: Sequence[str], log: Path
) -> AbstractContextManager[Client]:
    """Return a server of the export with these flags of a draft, or without any; it runs while the context does."""
    port = free_port()
    launch = program.launch(plan, settings, port, flags)
    return serving(launch, Client(port, program.title), log, start_seconds=program.start_seconds)


def _wait_until_healthy(process: subprocess.Popen[bytes], client: Client, log: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not client.is_healthy():
        if (status := process.poll()) is not None:
            raise EngineError(f"{client.title} ended with status {status} before it answered: {last_lines(log)}")
        if time.monotonic() > end:
            raise EngineError(f"{client.title} did not answer within {seconds:.0f} s: {last_lines(log)}")
        time.sleep(POLL_SECONDS)


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None, "it was opened as a pipe"
    process.stdin.close()
    try:
        process.wait(2 * guard.PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_lines(log: Path) -> str:
    """Return the last lines of a log as one."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
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
