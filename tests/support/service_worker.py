"""A worker in a process of its own whose searches are two steps; run as a program. Imports neither torch nor a model."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.service.durable_steps import DurableSteps

from tuner.service.contract import JobResult
from tuner.service.jobs import Jobs
from tuner.service.worker import SearchWorker, WorkerSettings


def two_steps(job: str, config: Mapping[str, Any], settings: WorkerSettings, jobs: Jobs) -> JobResult:
    """Write each step that runs into a file; the second waits for as long as a file tells it to."""
    log, hold = settings.folder / f"{job}.log", settings.folder / "hold"

    def step(name: str) -> float:
        with log.open("a") as file:
            file.write(f"{name}\n")
        while name == "second" and hold.exists():
            time.sleep(0.05)
        return 1.25

    steps = DurableSteps()
    found = [steps.run(name, lambda name=name: step(name), float) for name in ("first", "second")]  # type: ignore[misc]
    return JobResult(profile=str(found), claims_speedup=True, rows=[], report="", mlflow_run="run")


if __name__ == "__main__":
    SearchWorker(WorkerSettings(sys.argv[1], "", Path(sys.argv[2]), beat=0.5, grace=5.0), run=two_steps).run()
