"""`sdtune evaluate suite` from its settings to its results on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import RenderableType

from tuner.evaluation.suite.contract import Cell, Place, record_of
from tuner.evaluation.suite.document import BENCH, Suite
from tuner.evaluation.suite.execution import Execute, execute_apart, execute_here
from tuner.evaluation.suite.plan import cells_of, chosen, estimates
from tuner.evaluation.suite.report import plan_table, suite_csv, suite_json, suite_report, width
from tuner.evaluation.suite.settings import SuiteEvaluation
from tuner.inputs.models import resolve_device
from tuner.progress import Progress
from tuner.results import check_results_folder, stamped, write_json, write_result, write_text

NAME = "suite"


def run_and_write(settings: SuiteEvaluation, progress: Progress) -> tuple[RenderableType, int, bool]:
    """Run the cells without a result, and write suite.json, .csv and .txt after each comparison and at the end.

    Returns the tables, their width, and whether all chosen cells have a result. Raises `ConfigError` for wrong settings.
    """
    place = Place(Suite.load(settings.config), settings.out)
    check_results_folder(settings.out)
    cells = cells_of(place)
    asked = chosen(cells, settings.only)
    if settings.dry_run:
        planned = plan_table(place, asked, dict(estimates(place, asked)))
        return planned, width(planned), True
    settings.out.mkdir(exist_ok=True)
    execute = execute_here if settings.in_process else execute_apart
    ends = None if settings.sitting is None else time.monotonic() + settings.sitting
    _run(
        place,
        asked,
        execute,
        progress,
        lambda: ends is not None and time.monotonic() >= ends,
        lambda: _write(place, cells),
    )
    shown = _write(place, cells)
    return shown, width(shown), all(_is_done(place, cell) for cell in asked)


def _run(
    place: Place,
    cells: Sequence[Cell],
    execute: Execute,
    progress: Progress,
    is_over: Callable[[], bool],
    write: Callable[[], object],
) -> None:
    """Run the cells that have no result, each once, until the sitting is over."""
    for number, cell in enumerate(cells, 1):
        if _is_done(place, cell):
            continue
        if is_over():
            progress.say("the sitting is over: the same command goes on")
            return
        progress.say(f"cell {number} of {len(cells)}: {cell.id}")
        record = execute(place, cell, progress)
        progress.say(
            f"{cell.id}: {record.status}, {record.seconds:.0f} s" + (f": {record.cause}" if record.cause else "")
        )
        if cell.id.endswith(f"/{BENCH}"):
            write()


def _is_done(place: Place, cell: Cell) -> bool:
    record = record_of(place, cell)
    return record is not None and record.is_done


def _write(place: Place, cells: Sequence[Cell]) -> RenderableType:
    """Write all results so far and return the tables."""
    shown = suite_report(place, cells)
    device = resolve_device(cells[0].config().device)
    write_json(place.out, NAME, stamped(suite_json(place, cells), device))
    write_result(place.out, f"{NAME}.csv", suite_csv(place))
    write_text(place.out, NAME, shown, width=width(shown))
    return shown
