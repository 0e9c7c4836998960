"""The whole benchmark of one GPU in a quarter of an hour: `python -m benchmarks.gpu --out gpu`, in a checkout, without a network.

All steps share one process, as models are expensive to make. An error of CUDA spoils the process in which it happens: the steps
after the one in which it died run in a fresh one. Each result is on disk as its step ends; the same command runs the steps that
failed or had no time. `--device cpu --preset demo --stretch 6` tries it out on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

NEEDED = {
    **{name: name for name in ("click", "datasets", "greenlet", "jinja2", "mlflow", "optuna", "plotly", "psutil")},
    **{name: name for name in ("pydantic", "rich", "safetensors", "scipy", "sqlalchemy", "torch", "transformers")},
    **{"sklearn": "scikit-learn", "yaml": "pyyaml"},
}
"""Packages by the names that are imported, with their names for `pip`."""
RUNNING = "running"
WORKER = (sys.executable, "-m", "benchmarks.gpu.worker")


def missing_packages() -> list[str]:
    """Return the names, for `pip`, of the packages that cannot be found. Nothing is imported."""
    return [package for module, package in NEEDED.items() if find_spec(module) is None]


def read_record(out: Path, name: str) -> dict[str, Any] | None:
    path = out / "steps" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def write_record(out: Path, name: str, record: dict[str, Any]) -> None:
    path = out / "steps" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(record, indent=1), encoding="utf-8")
    unfinished.replace(path)


def run_steps(
    out: Path, limits: Mapping[str, float], seconds: float, order: Mapping[str, Any], worker: Sequence[str] = WORKER
) -> list[str]:
    """Run the steps that have not succeeded yet, each once and within `seconds`; return those that no time was left for.

    The steps after one in which their process died run in a fresh one.
    """
    start = time.time()
    waiting = [name for name in limits if (read_record(out, name) or {}).get("status") != "ok"]
    for name in waiting:  # a record that appears is this run's
        (out / "steps" / f"{name}.json").unlink(missing_ok=True)
    # What a step leaves of its limit is for the steps after it.
    ends = {
        name: min(start + each, start + seconds) for name, each in zip(limits, accumulate(limits.values()), strict=True)
    }
    while waiting and time.time() < start + seconds:
        steps = {name: ends[name] for name in waiting}
        with (out / "worker.log").open("a") as log:
            process = subprocess.Popen(
                [*worker, json.dumps({**order, "steps": steps})],
                stdin=subprocess.DEVNULL,
                stderr=log,
                process_group=0,  # killed together with the compiler processes that it starts
            )
        try:
            process.wait()  # it kills itself where a step does not end
        finally:
            with suppress(ProcessLookupError):  # nothing of the group is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for name in waiting:
            if (record := read_record(out, name)) is not None and record["status"] == RUNNING:
                write_record(out, name, {"status": "died", "cause": _how(process.returncode, out / "worker.log")})
        left = [name for name in waiting if read_record(out, name) is None]
        if left == waiting:
            raise RuntimeError(f"no step began: {_how(process.returncode, out / 'worker.log')}")
        waiting = left
    return waiting


def _how(code: int, log: Path) -> str:
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    lines = log.read_text(errors="replace").split("\n")
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
    parser.add_argument("--seconds", type=float, default=960.0, help="of all steps together")
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
    waiting: list[str] = []
    try:
        waiting = run_steps(args.out, limits, args.seconds * args.stretch, order)
    finally:
        records = {step.name: read_record(args.out, step.name) for step in PLAN}
        for name, record in records.items():
            if record is not None:
                causes = {key: value for key, value in record.items() if key not in ("rows", "profile") and value}
                show(f"{name}: {json.dumps(causes)[:1000]}", record.get("rows", []))
        if waiting:
            print(f"\nno time was left for: {' '.join(waiting)}: run the same command again")
        write(args.out / "gpu.json", {"preset": args.preset, "steps": records}, device=device)
    return int(any((records[name] or {}).get("status") != "ok" for name in limits))


if __name__ == "__main__":
    sys.exit(main())
