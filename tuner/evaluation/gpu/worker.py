"""The process that runs the steps in order and keeps their models: `python -m tuner.evaluation.gpu.worker ORDER`.

An event is written to standard output as each step begins and ends; whatever else is printed goes to standard error.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from pydantic import Field

from decoding.documents.strict_yaml import Document
from tuner.bench.collecting import InterruptedContestError
from tuner.evaluation.gpu.contract import GpuStep, OutOfTimeError
from tuner.evaluation.gpu.process import end_with
from tuner.evaluation.gpu.records import StepRecord, StepRecords
from tuner.evaluation.gpu.shared import Shared
from tuner.evaluation.gpu.side_by_side import partial_result

SPOILT_STATUS = 75
"""Exit status after a CUDA error that every later call would repeat."""
LONGEST_CAUSE = 600


class Order(Document):
    """What a worker is asked to do."""

    out: Path
    device: str
    preset: str
    threads: int | None = Field(None, description="CPU threads of torch; None for torch's own number")
    steps: tuple[str, ...]
    deadlines: dict[str, float] = Field(description="by step: when it must have ended, in seconds of `time.time`")


def run_steps(
    steps: Sequence[GpuStep],
    shared: Shared,
    records: StepRecords,
    ends: Mapping[str, float],
    say: Callable[[str, str], None],
) -> int:
    """Run the steps in order, writing their records; return the exit status of the process.

    Stops after a step that spoilt the process.
    """
    for step in steps:
        say("started", step.name)
        record = attempt(step, shared, ends[step.name] - time.time())
        records.write(record)
        say("finished", step.name)
        if record.status != "ok" and not shared.device_answers():
            return SPOILT_STATUS
        gc.collect()
        shared.release_memory()
    return 0


def attempt(step: GpuStep, shared: Shared, seconds: float) -> StepRecord:
    """Run one step and return its record, also if it fails. The traceback of an error goes to standard error."""
    start = time.perf_counter()
    facts: dict[str, Any]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            facts = {"status": "ok", "result": _interruptible(lambda: step.run(shared, seconds))}
        except InterruptedContestError as early:
            result = partial_result(early.samples, early.left_out)
            facts = {"status": "given up", "cause": f"out of time: interrupted after {seconds:.0f} s", "result": result}
        except KeyboardInterrupt:
            facts = {"status": "given up", "cause": f"out of time: interrupted after {seconds:.0f} s"}
        except OutOfTimeError as early:
            facts = {"status": "given up", "cause": f"out of time after {seconds:.0f} s", "result": early.result}
        except Exception as cause:  # a step may fail in any way: its cause is its result, and the next step goes on
            traceback.print_exc()
            facts = {"status": "failed", "cause": describe_error(cause)}
    shown = dict.fromkeys(" ".join(str(each.message).split())[:LONGEST_CAUSE] for each in caught)
    return StepRecord(name=step.name, seconds=time.perf_counter() - start, warnings=tuple(shown), **facts)


def describe_error(cause: BaseException) -> str:
    """Return kind and message of an error on one line, and the place of the project's code where it arose."""
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if _is_ours(frame.filename)]
    at = f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:LONGEST_CAUSE]}{at}"


def _is_ours(filename: str) -> bool:
    root = Path(__file__).parents[3]
    return Path(filename).is_relative_to(root) and "site-packages" not in filename


def _interruptible(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run with SIGINT raising `KeyboardInterrupt`; elsewhere the worker ignores it, as it would hit the wrong step."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def main(text: str) -> int:
    """Carry out an `Order` given as JSON; return the exit status."""
    from tuner.evaluation.gpu.plan import steps_named

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    events = _take_standard_output()

    def say(what: str, name: str) -> None:
        print(json.dumps({what: name}), file=events, flush=True)

    order = Order.model_validate(json.loads(text))
    if order.threads is not None:
        torch.set_num_threads(order.threads)
    shared = Shared(order.out, order.device, order.preset)
    return run_steps(steps_named(order.steps), shared, StepRecords(order.out), order.deadlines, say)


def _take_standard_output() -> IO[str]:
    """Return standard output as a file for events alone; what others print there goes to standard error from now on."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
