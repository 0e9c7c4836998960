"""`sdtune evaluate gpu` from its settings to its results on disk."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial

from rich.console import RenderableType

from decoding.documents.strict_yaml import suggest
from tuner.errors import ConfigError
from tuner.evaluation.gpu.contract import GpuStep
from tuner.evaluation.gpu.plan import PLAN
from tuner.evaluation.gpu.process import ProcessWorker
from tuner.evaluation.gpu.records import StepRecords
from tuner.evaluation.gpu.report import document, table
from tuner.evaluation.gpu.settings import GpuEvaluation
from tuner.evaluation.gpu.shared import DEMO
from tuner.evaluation.gpu.stretched import Stretched
from tuner.evaluation.gpu.supervisor import Supervisor, Worker
from tuner.inputs.models import resolve_device
from tuner.progress import Progress
from tuner.results import check_results_folder, stamped, write_json, write_text

NAME = "gpu"
WIDTH = 170


def run_and_write(settings: GpuEvaluation, progress: Progress) -> tuple[RenderableType, bool]:
    """Run the unfinished steps, write gpu.json and gpu.txt, and return the table and whether all steps succeeded.

    Raises `ConfigError` outside a checkout, and for a device or folder that cannot be used.
    """
    if not DEMO.is_dir():
        raise ConfigError(f"there is no {DEMO} here: run the command in a checkout of sdtune")
    check_results_folder(settings.out)
    device = resolve_device(settings.device)
    steps = [Stretched(step, settings.stretch) for step in _chosen(settings.step)]
    settings.out.mkdir(exist_ok=True)
    records = StepRecords(settings.out)

    def write(not_run: Sequence[str] = ()) -> None:
        found = document(reported_steps(steps, records), records, preset=settings.preset, not_run=not_run)
        write_json(settings.out, NAME, stamped(found, device))

    supervisor = Supervisor(
        steps,
        records,
        partial(_open_worker, settings),
        seconds=settings.seconds * settings.stretch,
        clock=time.time,
        progress=progress,
        on_step=write,
    )
    write(supervisor.run())
    shown = table(reported_steps(steps, records), records)
    write_text(settings.out, NAME, shown, width=WIDTH)
    return shown, not records.unfinished([step.name for step in steps])


def _chosen(names: Sequence[str]) -> list[GpuStep]:
    """Return the named steps in the order of the plan, or all. Raises `ConfigError` for an unknown name."""
    known = [step.name for step in PLAN]
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown step {name!r}; {suggest(name, known)}")
    return [step for step in PLAN if step.name in (names or known)]


def reported_steps(asked: Sequence[GpuStep], records: StepRecords) -> list[GpuStep]:
    """Return the steps `asked` for and those that an earlier run in the same folder recorded, in the order of the plan."""
    by_name = {step.name: step for step in asked}
    known = (by_name.get(step.name, step) for step in PLAN)
    return [step for step in known if step.name in by_name or records.read(step.name) is not None]


def _open_worker(settings: GpuEvaluation, names: Sequence[str], deadlines: Mapping[str, float]) -> Worker:
    order = {
        "out": str(settings.out),
        "device": settings.device,
        "preset": settings.preset,
        "threads": settings.threads,
        "steps": list(names),
        "deadlines": dict(deadlines),
    }
    return ProcessWorker(settings.out, order)
