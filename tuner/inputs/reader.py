"""The process that reads data sets (`tuner.inputs.data_files`): started once, limited, and replaced when it dies."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tuner.errors import ConfigError, DatasetError
from tuner.inputs.data_files import FRAME

MEMORY = "SDTUNE_DATASET_MEMORY"
SECONDS = "SDTUNE_DATASET_SECONDS"
DEFAULTS = {MEMORY: 4 * 2**30, SECONDS: 600}
"""Bytes beyond the libraries', and seconds of one request. Files are read in pieces, so that data of any size fit."""
MOST_ANSWER = 2**28
START = "import sys; sys.path.append(sys.argv.pop(1)); from tuner.inputs.data_files import main; main()"
"""The first argument is the folder of this package: a checkout may run without being installed."""


class Reader:
    """One process, used by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._started_by = os.getpid()

    def ask(self, request: dict[str, Any]) -> Any:
        """Return the answer to a request; raise `DatasetError` for data that cannot be read within the limits."""
        with self._lock:
            process = self._running()
            try:
                found = self._exchange(process, json.dumps(request).encode(), request["order"]["location"])
            except BaseException:
                self.close()
                raise
        if "error" in found:
            raise DatasetError(found["error"])
        return found["found"]

    def close(self) -> None:
        """End the process, if there is one; the next request starts another."""
        process, self._process = self._process, None
        if process is not None and self._started_by == os.getpid():
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._started_by != os.getpid():  # in a fork: the pipes are its parent's
            self._process, self._started_by = None, os.getpid()
        if self._process is None:
            # -P: modules of the current folder are not the program's.
            code = str(Path(__file__).resolve().parents[2])
            command = [sys.executable, "-P", "-c", START, code, str(_limit(MEMORY)), str(_limit(SECONDS))]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )
        return self._process

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes, location: str) -> dict[str, Any]:
        assert process.stdin is not None
        ends = time.monotonic() + _limit(SECONDS)
        try:
            process.stdin.write(FRAME.pack(len(request)) + request)
            (length,) = FRAME.unpack(self._receive(process, FRAME.size, ends, location))
            if length > MOST_ANSWER:
                raise DatasetError(f"the dataset {location} cannot be read: its values take {length >> 20} MiB")
            return dict(json.loads(self._receive(process, length, ends, location)))
        except (BrokenPipeError, EOFError):
            status = process.wait()
            raise DatasetError(f"the dataset {location} cannot be read: its reader {_ended(status)}") from None

    def _receive(self, process: subprocess.Popen[bytes], count: int, ends: float, location: str) -> bytes:
        assert process.stdout is not None
        received, ready = bytearray(), select.poll()
        ready.register(process.stdout, select.POLLIN)
        while len(received) < count:
            if not ready.poll(max(0.0, ends - time.monotonic()) * 1000):
                raise DatasetError(
                    f"the dataset {location} cannot be read within {_limit(SECONDS)} seconds: {SECONDS} sets another limit"
                )
            piece = os.read(process.stdout.fileno(), count - len(received))
            if not piece:
                raise EOFError
            received += piece
        return bytes(received)


READER = Reader()
"""The reader of this process."""
atexit.register(READER.close)


def _limit(name: str) -> int:
    given = os.environ.get(name)
    if given is None:
        return DEFAULTS[name]
    if not given.isdecimal() or not 1 <= int(given) < 2**62:
        raise ConfigError(f"{name} is {given!r}: give a whole number, such as {DEFAULTS[name]}")
    return int(given)


def _ended(status: int) -> str:
    if status == -signal.SIGXCPU:
        return f"took more than {_limit(SECONDS)} seconds of a processor ({SECONDS} sets another limit)"
    if status >= 0:
        return f"ended with status {status}"
    return (
        f"was ended by {signal.Signals(-status).name} (it may need more memory: {MEMORY}, now {_limit(MEMORY)} bytes)"
    )
