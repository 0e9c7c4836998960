"""A step of the GPU benchmark: one command in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAM = (sys.executable, "-m", "tuner.cli.main")


@dataclass(frozen=True)
class BenchmarkStep:
    """One command of `sdtune`: its arguments, and the seconds after which it is given up."""

    name: str
    arguments: tuple[str, ...]
    timeout: float


@dataclass(frozen=True)
class Done:
    """Outcome of a step."""

    name: str
    ok: bool
    seconds: float
    last_line: str
    """Last line of the step's output, or the reason why it was not run."""


def run_step(step: BenchmarkStep, out: Path, program: Sequence[str] = PROGRAM) -> Done:
    """Run one step; its output goes into a file of the step's name."""
    log = out / f"{step.name.replace(' ', '_')}.log"
    start = time.perf_counter()
    try:
        with log.open("w") as file:
            code = subprocess.run(
                [*program, *step.arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=step.timeout,
                check=False,
            ).returncode
        last_line = _last_line(log)
    except subprocess.TimeoutExpired:
        code, last_line = 1, f"given up after {step.timeout:.0f} s"
    return Done(step.name, code == 0, time.perf_counter() - start, last_line)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
