"""The whole benchmark of one GPU in ten minutes: `python -m benchmarks.gpu --out gpu`, in a checkout, without a network.

All steps share one process, as models are expensive to make. An error of CUDA spoils the process in which it happens: the steps
after the one in which it died run in a fresh one. Each result is on disk as its step ends; the same command runs the steps that
failed or had no time. `--device cpu --preset demo --stretch 6` tries it out on any machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GRACE_SECONDS = 10.0
"""Seconds between the interrupt of a step and the end of its process."""
POLL_SECONDS = 0.2
NEEDED = {
    **{name: name for name in ("click", "datasets", "greenlet", "jinja2", "mlflow", "optuna", "plotly", "psutil")},
    **{name: name for name in ("pydantic", "rich", "safetensors", "scipy", "sqlalchemy", "torch", "transformers")},
    **{"sklearn": "scikit-learn", "yaml": "pyyaml"},
}
"""Packages by the names that are imported, with their names for `pip`."""
WORKER = (sys.executable, "-m", "benchmarks.gpu.worker")


def missing_packages() -> list[str]:
    """Return the names, for `pip`, of the packages that cannot be found. Nothing is imported."""
    return [package for module, package in NEEDED.items() if find_spec(module) is None]


def read_record(out: Path, name: str) -> dict[str, Any] | None:
    path = out / "steps" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


class GpuRun:
    """A run of steps that have not succeeded yet, each once, until `end` (seconds of `time.time`)."""

    def __init__(self, out: Path, limits: Mapping[str, float], seconds: float, order: Mapping[str, Any]) -> None:
        start = time.time()
        self._out, self._order, self._end = out, order, start + seconds
        ends = itertools.accumulate(limits.values())
        # What a step leaves of its limit is for the steps after it.
        self._ends = {name: min(start + each, self._end) for name, each in zip(limits, ends, strict=True)}
        self.waiting = [name for name in limits if (read_record(out, name) or {}).get("status") != "ok"]
        for name in self.waiting:  # a record that appears is this run's
            (out / "steps" / f"{name}.json").unlink(missing_ok=True)

    def all_steps(self, worker: tuple[str, ...] = WORKER) -> None:
        """Run the steps, in a fresh process whenever the one before has died."""
        while self.waiting and time.time() < self._end:
            order = {**self._order, "parent": os.getpid(), "steps": {name: self._ends[name] for name in self.waiting}}
            with (self._out / "worker.log").open("a") as log:
                process = subprocess.Popen(
                    [*worker, json.dumps(order)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    process_group=0,  # killed together with the compiler processes that it starts
                )
            try:
                self._watch(process)
            finally:
                with suppress(ProcessLookupError):  # nothing of the group is left
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Follow a process to its end, or until a step does not end; write the record of a step that could not write its own."""
        began, num_before = time.time(), len(self.waiting)
        while True:
            has_ended = process.poll() is not None
            while self.waiting and (record := read_record(self._out, self.waiting[0])) is not None:
                print(f"{self.waiting.pop(0)}: {record['status']}", file=sys.stderr, flush=True)
                began = time.time()
            if not self.waiting:
                return
            name = self.waiting[0]
            if has_ended:
                gave_itself_up = len(self.waiting) < num_before and process.returncode == 75
                if not gave_itself_up:  # because an error of CUDA had spoilt it
                    self._close(name, "died", began, f"the process ended ({self._how(process.returncode)})")
                return
            if time.time() > max(self._ends[name], began) + GRACE_SECONDS:
                self._close(name, "given up", began, f"interrupted, and killed {GRACE_SECONDS:.0f} s later")
                return
            time.sleep(POLL_SECONDS)

    def _close(self, name: str, status: str, began: float, cause: str) -> None:
        path = self._out / "steps" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"status": status, "cause": cause, "seconds": time.time() - began}))
        self.waiting.remove(name)

    def _how(self, code: int) -> str:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        lines = (self._out / "worker.log").read_text(errors="replace").split("\n")
        return f"{how}: {next((line.strip()[:300] for line in reversed(lines) if line.strip()), 'no output')}"


def main() -> int:
    if missing := missing_packages():
        sys.exit(f"packages are missing: pip install {' '.join(missing)}")
    from benchmarks.gpu.plan import PLAN
    from benchmarks.results import show, write
    from tuner.inputs.models import resolve_device

    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu to try the plan")
    sizes = ("demo", "250m", "5b", "llama-8b-like")
    parser.add_argument("--preset", choices=sizes, default="llama-8b-like", help="sizes of the widened model")
    parser.add_argument(
        "--step", action="append", choices=[step.name for step in PLAN], help="repeatable; default: all"
    )
    parser.add_argument("--seconds", type=float, default=555.0, help="of all steps together")
    parser.add_argument("--stretch", type=float, default=1.0, help="factor on all limits, for slower devices")
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder of the results")
    args = parser.parse_args()
    if not Path("configs/demo").is_dir():
        sys.exit("there is no configs/demo here: run the command in a checkout of sdtune")
    device = resolve_device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    limits = {step.name: step.limit_seconds * args.stretch for step in PLAN if not args.step or step.name in args.step}
    order = {"out": str(args.out), "device": args.device, "preset": args.preset, "threads": args.threads}
    run = GpuRun(args.out, limits, args.seconds * args.stretch, order)
    try:
        run.all_steps()
    finally:
        records = {step.name: read_record(args.out, step.name) for step in PLAN}
        for name, record in records.items():
            if record is not None:
                causes = {key: value for key, value in record.items() if key not in ("rows", "profile") and value}
                show(f"{name}: {json.dumps(causes)[:1000]}", record.get("rows", []))
        if run.waiting:
            print(f"\nno time was left for: {' '.join(run.waiting)}: run the same command again")
        write(args.out / "gpu.json", {"preset": args.preset, "steps": records}, device=device)
    return int(any((records[name] or {}).get("status") != "ok" for name in limits))


if __name__ == "__main__":
    sys.exit(main())
