"""The worker as a process of its own: events as JSON lines on its standard output, everything else in a log."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tuner.evaluation.gpu.supervisor import Ended, Event, Finished, Started

LOG = "worker.log"
PROGRAM = (sys.executable, "-m", "tuner.evaluation.gpu.worker")


class ProcessWorker:
    """A process that runs the worker's program, in a process group of its own, with its log in `out`."""

    def __init__(self, out: Path, order: Mapping[str, object], program: Sequence[str] = PROGRAM) -> None:
        self._log = out / LOG
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [*program, json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,  # killed together with the compiler processes that it starts
            )
        self._events: queue.Queue[Event] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self, seconds: float) -> Event | None:
        """See `Worker.wait`."""
        try:
            return self._events.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return None

    def interrupt(self) -> None:
        """See `Worker.interrupt`."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """See `Worker.kill`."""
        with suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        with self._process.stdout as events:
            for line in events:
                event = json.loads(line)
                self._events.put(Started(event["started"]) if "started" in event else Finished(event["finished"]))
        self._events.put(Ended(self._how_it_ended()))

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"the process ended ({how}): {lines[-1][:300]}" if lines else f"the process ended ({how})"


def end_with(parent: int) -> None:
    """Wait until the process `parent` is gone, then end this process and the ones that it started.

    For a thread of the worker: a supervisor that is killed cannot end it, and the device would stay occupied.
    """
    while os.getppid() == parent:
        time.sleep(1.0)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
