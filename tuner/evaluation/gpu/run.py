"""All steps of the GPU benchmark in order, within one time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from tuner.evaluation.gpu.report import figures
from tuner.evaluation.gpu.steps import BenchmarkStep, Done, run_step
from tuner.progress import Progress, Unwatched
from tuner.results import stamped, write_json

NAME = "gpu_benchmark"
TOTAL_SECONDS = 580.0

RunCommand = Callable[[BenchmarkStep, Path], Done]


def run_all(
    steps: Sequence[BenchmarkStep],
    out: Path,
    run: RunCommand = run_step,
    *,
    seconds: float = TOTAL_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = Unwatched(),  # noqa: B008 - has no state
) -> list[Done]:
    """Run the steps in order, within `seconds` together; results so far are on disk after each.

    A step gets what is left of the time if that is less than its own limit. If nothing is left, it is not run.
    """
    end = clock() + seconds
    done: list[Done] = []
    progress.stage("steps", len(steps))
    for step in steps:
        progress.show(step.name)
        left = end - clock()
        if left > 0:
            done.append(run(replace(step, timeout=min(step.timeout, left)), out))
        else:
            done.append(Done(step.name, False, 0.0, f"not run: the {seconds:.0f} s for all steps are up"))
        document = {"steps": [asdict(each) for each in done], "figures": figures(out)}
        write_json(out, NAME, stamped(document, _device()))
        progress.advance()
    return done


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
