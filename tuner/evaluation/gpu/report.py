"""The results of all steps: one document, and a table that fits on a screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from tuner.evaluation.gpu.contract import GpuStep
from tuner.evaluation.gpu.records import StepRecord, StepRecords
from tuner.evaluation.gpu.side_by_side import partial_lines
from tuner.tables import figures_table

LONGEST_LINE, MOST_LINES = 150, 13
LONGEST_WARNING, MOST_WARNINGS = 110, 1
"""What the table shows of a step; the document has everything."""


def document(steps: Sequence[GpuStep], records: StepRecords, *, preset: str, not_run: Sequence[str]) -> dict[str, Any]:
    """Return the records of the steps with their questions as plain data; steps without a record have a reason."""
    entries = []
    for step in steps:
        record = records.read(step.name)
        facts = {"status": "not run", "cause": _why(step.name, not_run)} if record is None else _facts(record)
        entries.append({"name": step.name, "question": step.question, "limit_seconds": step.limit_seconds, **facts})
    return {"preset": preset, "steps": entries}


def _facts(record: StepRecord) -> dict[str, Any]:
    return record.model_dump(mode="json", exclude={"name"})


def _why(name: str, not_run: Sequence[str]) -> str:
    return "no time was left: run the same command again" if name in not_run else "not run yet"


def table(steps: Sequence[GpuStep], records: StepRecords) -> Table:
    """Return a table with the answer of each step in a few lines, or the reason why there is none."""
    shown = figures_table("Benchmark of one GPU", "step", "seconds")
    shown.add_column("result", overflow="fold")
    for step in steps:
        record = records.read(step.name)
        if record is None:
            shown.add_row(step.name, "", "not run")
        else:
            shown.add_row(step.name, f"{record.seconds:.0f}", "\n".join(_lines(step, record)))
    return shown


def _lines(step: GpuStep, record: StepRecord) -> list[str]:
    lines = [] if record.status == "ok" else [f"{record.status.upper()}: {record.cause}"]
    if record.result is not None:
        lines += partial_lines(record.result) if "interrupted" in record.result else step.lines(record.result)
    warnings = [f"warning: {warning}"[:LONGEST_WARNING] for warning in record.warnings[:MOST_WARNINGS]]
    return [*(line[:LONGEST_LINE] for line in lines[:MOST_LINES]), *warnings]
