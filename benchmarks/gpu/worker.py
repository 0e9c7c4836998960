"""The process that runs the steps in order and keeps their models, started by `benchmarks.gpu` with an order.

The record of a step is on disk as it ends. A step that exceeds its time is interrupted as by Ctrl-C, so that a search still writes
its best profile; one that does not end then is killed with this process.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from benchmarks.gpu.__main__ import RUNNING, write_record
from benchmarks.gpu.plan import PLAN, Step
from benchmarks.gpu.shared import Shared
from benchmarks.gpu.timing import Interrupted
from decoding.errors import one_line

GRACE_SECONDS = 10.0
"""Seconds between the interrupt of a step and the end of its process."""
LONGEST_CAUSE = 600
LEAST_SECONDS = 1.0
"""Of a part of the compiler that is reported; parts lie within one another."""


def attempt(step: Step, shared: Shared, seconds: float) -> dict[str, Any]:
    """Run one step within `seconds` and return its record, also if it fails. Tracebacks go to standard error."""
    start, facts, known = time.perf_counter(), dict[str, Any](), _compiled()
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # raises `KeyboardInterrupt`
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            facts = {"status": "ok", **step.run(shared, seconds)}
        except (Interrupted, KeyboardInterrupt) as early:
            result = early.result if isinstance(early, Interrupted) else {}
            facts = {"status": "given up", "cause": f"interrupted after {seconds:.0f} s", **result}
        except Exception as cause:  # a step may fail in any way: its cause is its result, and the next step goes on
            traceback.print_exc()
            facts = {"status": "failed", "cause": f"{type(cause).__name__}: {one_line(cause)[:LONGEST_CAUSE]}"}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
    texts = dict.fromkeys(" ".join(str(each.message).split())[:LONGEST_CAUSE] for each in caught)
    spent = {name: each - known.get(name, 0.0) for name, each in _compiled().items()}
    spent = {name: round(each, 1) for name, each in spent.items() if each >= LEAST_SECONDS}
    return {**facts, "seconds": time.perf_counter() - start, "compiled": spent, "warnings": list(texts)}


def _compiled() -> dict[str, float]:
    """Return the number of graphs compiled so far, and the seconds that each part of the compiler took for them."""
    parts = {name: sum(each) for name, each in torch._dynamo.utils.compilation_time_metrics.items()}
    return {"graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"], **parts}


def main(text: str) -> int:
    """Carry out an order: `steps` with the time at which each must have ended, in seconds of `time.time`."""
    order = json.loads(text)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if order["threads"]:
        torch.set_num_threads(order["threads"])
    out = Path(order["out"])
    shared = Shared(out, order["device"], order["preset"])
    steps = {step.name: step for step in PLAN}
    for name, end in order["steps"].items():
        write_record(out, name, {"status": RUNNING})
        # Ends the process where neither an error nor the alarm ends the step: the device must get free.
        faulthandler.dump_traceback_later(max(end - time.time(), 0.0) + GRACE_SECONDS, exit=True)
        record = attempt(steps[name], shared, end - time.time())
        faulthandler.cancel_dump_traceback_later()
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
