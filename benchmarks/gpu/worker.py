"""The process that runs the steps in order and keeps their models, started by `benchmarks.gpu` with an order.

The record of a step is on disk as it ends. A step that exceeds its time is interrupted as by Ctrl-C, so that a search still writes
its best profile; one that does not end then is killed with this process.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.__main__ import RUNNING, write_record
from benchmarks.gpu.plan import PLAN, Step
from benchmarks.gpu.shared import Shared
from benchmarks.gpu.timing import Interrupted

GRACE_SECONDS = 10.0
"""Seconds between the interrupt of a step and the end of its process."""
LONGEST_CAUSE = 600


def attempt(step: Step, shared: Shared, seconds: float) -> dict[str, Any]:
    """Run one step and return its record, also if it fails. The traceback of an error goes to standard error."""
    start, facts = time.perf_counter(), dict[str, Any]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            facts = {"status": "ok", **_interruptible(step, shared, seconds)}
        except Interrupted as early:
            facts = {"status": "given up", "cause": f"interrupted after {seconds:.0f} s", **early.result}
        except KeyboardInterrupt:
            facts = {"status": "given up", "cause": f"interrupted after {seconds:.0f} s"}
        except Exception as cause:  # a step may fail in any way: its cause is its result, and the next step goes on
            traceback.print_exc()
            facts = {"status": "failed", "cause": _described(cause)}
    texts = dict.fromkeys(" ".join(str(each.message).split())[:LONGEST_CAUSE] for each in caught)
    return {**facts, "seconds": time.perf_counter() - start, "warnings": list(texts)}


def _interruptible(step: Step, shared: Shared, seconds: float) -> dict[str, Any]:
    """Run the step with an alarm that raises `KeyboardInterrupt` when its seconds are over."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        return step.run(shared, seconds)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)


def _described(cause: BaseException) -> str:
    """Return kind and message of an error on one line, and the place of the project's code where it arose."""
    root = str(Path(__file__).parents[2])
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if frame.filename.startswith(root)]
    ours = [frame for frame in frames if "site-packages" not in frame.filename]
    at = f" (at {Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:LONGEST_CAUSE]}{at}"


class Watchdog(threading.Thread):
    """Kills this process and those that it started when a step does not end, or its parent is gone: the device must get free."""

    end = float("inf")

    def __init__(self, parent: int) -> None:
        super().__init__(daemon=True)
        self._parent = parent

    def run(self) -> None:
        while os.getppid() == self._parent and time.time() < self.end + GRACE_SECONDS:
            time.sleep(0.5)
        os.killpg(os.getpgrp(), signal.SIGKILL)


def main(text: str) -> int:
    """Carry out an order: `steps` with the time at which each must have ended, in seconds of `time.time`."""
    order = json.loads(text)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watchdog = Watchdog(order["parent"])
    watchdog.start()
    if order["threads"]:
        torch.set_num_threads(order["threads"])
    out = Path(order["out"])
    shared = Shared(out, order["device"], order["preset"])
    steps = {step.name: step for step in PLAN}
    for name, end in order["steps"].items():
        write_record(out, name, {"status": RUNNING})
        watchdog.end = max(end, time.time())
        record = attempt(steps[name], shared, end - time.time())
        write_record(out, name, record)
        print(f"{name}: {record['status']}", flush=True)
        if record["status"] != "ok" and not shared.device_answers():
            return 1  # after a CUDA error that every later call would repeat
        gc.collect()
        if shared.device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
