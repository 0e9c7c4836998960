"""The process that runs the steps in order and keeps their models, started by `benchmarks.gpu` with an order.

The record of a step is on disk as it ends. A step that exceeds its time is interrupted as by Ctrl-C, so that a search still writes
its best profile; one that does not end then, `benchmarks.gpu` kills together with this process.
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

from benchmarks.gpu.plan import PLAN, Step
from benchmarks.gpu.shared import Shared
from benchmarks.gpu.timing import Interrupted

SPOILT_STATUS = 75
"""Exit status after a CUDA error that every later call would repeat."""
LONGEST_CAUSE = 600


def write_record(out: Path, name: str, record: dict[str, Any]) -> None:
    path = out / "steps" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(record, indent=1), encoding="utf-8")
    unfinished.replace(path)


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


def _end_with(parent: int) -> None:
    """Wait until the process `parent` is gone, then end this process and the ones that it started.

    A parent that is killed cannot end it, and the device would stay occupied.
    """
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(text: str) -> int:
    """Carry out an order: `steps` with the time at which each must have ended, in seconds of `time.time`."""
    order = json.loads(text)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(order["parent"],), daemon=True).start()
    if order["threads"]:
        torch.set_num_threads(order["threads"])
    out = Path(order["out"])
    shared = Shared(out, order["device"], order["preset"])
    steps = {step.name: step for step in PLAN}
    for name, end in order["steps"].items():
        record = attempt(steps[name], shared, end - time.time())
        write_record(out, name, record)
        if record["status"] != "ok" and not shared.device_answers():
            return SPOILT_STATUS
        gc.collect()
        if shared.device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
