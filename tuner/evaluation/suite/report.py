"""Reports of a suite: tables, CSV and JSON. Measures nothing."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from decoding.profile import Interval
from tuner.bench.contenders import PLAIN
from tuner.evaluation.suite.bench_cell import TUNED_ON, BenchCell
from tuner.evaluation.suite.contract import Cell, Place, record_of
from tuner.evaluation.suite.document import TUNING
from tuner.evaluation.suite.figures import request_metrics
from tuner.evaluation.suite.standing import Standing
from tuner.measuring.comparison import Phase
from tuner.tables import figures_table

STOCK = "hf"
OVERALL, DEPLOYED = "overall", "as decided"
UNKNOWN, KEPT = "-", "*"
"""Marks in the tables: no figures; the search of this method keeps plain decoding here."""
LEAST_WIDTH, WIDEST = 110, 10_000

Overall = tuple[Interval, int] | None


def standings(place: Place) -> list[Standing]:
    """Return the results of each model in each precision that has any."""
    found = [Standing(place, model, p) for model in place.suite.models for p in place.suite.precisions]
    return [standing for standing in found if standing.benches]


def width(shown: RenderableType) -> int:
    """Return the columns that the widest of the tables needs, so that no cell is broken."""
    console = Console(width=WIDEST)
    tables = [each for each in getattr(shown, "renderables", ()) if isinstance(each, Table)]
    return max([LEAST_WIDTH, *(console.measure(each).maximum for each in tables)])


def suite_report(place: Place, cells: Sequence[Cell]) -> RenderableType:
    """Return all tables, and below them what has no figures and why."""
    parts: list[RenderableType] = []
    for standing in standings(place):
        parts += _tables(standing)
        parts += [Text(line) for line in _remarks(standing)]
        parts.append(Text())
    parts += [Text(line) for line in _unfinished(place, cells)]
    return Group(*parts) if parts else Text("no comparison is finished yet")


def _tables(standing: Standing) -> Iterator[RenderableType]:
    """Yield each table after its title, on a line of its own: a title of the table would be wrapped to its width."""
    where = f"{standing.model}, {standing.precision}"
    yield Text(f"{where}: decode speed-up over plain decoding (95 % intervals over prompts)")
    yield _speedups(standing, Phase.DECODE, with_decided=True)
    yield Text(f"{where}: end-to-end speed-up over plain decoding, prefill included")
    yield _speedups(standing, Phase.END_TO_END)
    if STOCK in standing.names:
        yield Text(f"{where}: decode speed-up over transformers' generate")
        yield _speedups(standing, Phase.DECODE, reference=STOCK)
    yield Text(f"{where}: acceptance length (tokens per step, the target's own included)")
    yield _each_task(standing, _acceptance)
    yield Text(f"{where}: sequences identical to plain decoding")
    yield _each_task(standing, _identical)
    for method in standing.place.suite.transfer:
        yield Text(f"{where}: decode speed-up of {method} where it was not tuned")
        yield _transfer(standing, method)


def _speedups(standing: Standing, phase: Phase, *, reference: str = PLAIN, with_decided: bool = False) -> Table:
    table = _table("method", *standing.benches, OVERALL, *([DEPLOYED] if with_decided else []))
    for name in standing.names:
        cells = [
            _interval(standing.speedup(task, name, phase, reference), standing.keeps_plain(task, name))
            for task in standing.benches
        ]
        cells.append(_overall(standing, standing.overall(name, phase, reference)))
        if with_decided:
            cells.append(_overall(standing, standing.deployed(name)) if name in standing.place.suite.methods else "")
        table.add_row(Text(_label(standing, name)), *cells)
    return table


def _each_task(standing: Standing, cell: Callable[[Standing, str, str], str]) -> Table:
    table = _table("method", *standing.benches)
    for name in standing.names:
        table.add_row(Text(_label(standing, name)), *(cell(standing, task, name) for task in standing.benches))
    return table


def _transfer(standing: Standing, method: str) -> Table:
    table = _table("tuned on", *standing.benches, "other tasks")
    for tuned_on in standing.place.suite.tasks:
        cells = [_interval(standing.moved(method, tuned_on, task)) for task in standing.benches]
        table.add_row(Text(tuned_on), *cells, _overall(standing, standing.moved_overall(method, tuned_on), less=1))
    return table


def _table(first: str, *headings: str) -> Table:
    table = figures_table("", first, *headings)
    table.title = None
    return table


def _label(standing: Standing, name: str) -> str:
    if name != PLAIN:
        return name
    return f"{PLAIN} ({next(iter(standing.benches.values())).facts['runner']})"


def _interval(interval: Interval | None, is_kept: bool = False) -> str:
    return UNKNOWN if interval is None else f"{interval}{KEPT if is_kept else ''}"


def _overall(standing: Standing, found: Overall, less: int = 0) -> str:
    """Return a mean, and the number of its tasks if it is not over all that have results, `less` ones aside."""
    if found is None:
        return UNKNOWN
    interval, num_tasks = found
    return f"{interval}" + (f" ({num_tasks} tasks)" if num_tasks < len(standing.benches) - less else "")


def _acceptance(standing: Standing, task: str, name: str) -> str:
    metrics = request_metrics(standing.benches[task], name)
    return UNKNOWN if metrics is None else f"{metrics.mean_acceptance_length:.2f}"


def _identical(standing: Standing, task: str, name: str) -> str:
    measured = standing.benches[task].of(name)
    if measured is None:
        return UNKNOWN
    ties = sum(sample.tie for sample in measured.samples)
    identical = sum(sample.identical for sample in measured.samples)
    return f"{identical}/{len(measured.samples)}" + (f" + {ties} tie{'s' if ties > 1 else ''}" if ties else "")


def _remarks(standing: Standing) -> Iterator[str]:
    yield f"{OVERALL}: geometric mean over the tasks. {DEPLOYED}: with plain decoding where the search decided for it ({KEPT})."
    for task, bench in standing.benches.items():
        best = standing.best(task)
        if best is not None and best[1].ci95[0] <= 1.0:
            yield f"{task}: nothing beats plain decoding with 95 % confidence; the best is {best[0]}, {best[1]}"
        yield from (f"{task}: {note}" for note in bench.facts.get("prompt_notes", ()))
        if (num_missing := bench.num_prompts - len(bench.counted)) > 0:
            yield f"{task}: {num_missing} of {bench.num_prompts} prompts end too soon to be timed"
        for name, reason in bench.left_out.items():
            yield f"{task}: {name} is left out: {reason}"
    yield from _drafts(standing)


def _drafts(standing: Standing) -> Iterator[str]:
    """Yield a line for the draft of each search; a search for all tasks has one line."""
    suite = standing.place.suite
    for searched in [task for task in suite.searched_tasks if task == TUNING or task in standing.benches]:
        measured = next(iter(standing.benches)) if searched == TUNING else searched
        for name in suite.methods:
            if (found := standing.searches[measured, name]) is not None:
                yield f"{searched}: {name} is {found.draft} ({found.trials} trials, {found.search_seconds:.0f} s)"


def _unfinished(place: Place, cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a line for each failed cell and one for the number of those without a result."""
    records = {cell.id: record_of(place, cell) for cell in cells}
    for cell_id, record in records.items():
        if record is not None and not record.is_done:
            yield f"{cell_id} {record.status}: {record.cause}"
    if waiting := sum(record is None for record in records.values()):
        yield f"{waiting} of {len(records)} cells have not run yet"


def figures(place: Place) -> list[dict[str, Any]]:
    """Return one line of figures per model, precision, task and contender, drafts from other tasks included."""
    return [line for standing in standings(place) for task in standing.benches for line in _lines(standing, task)]


def _lines(standing: Standing, task: str) -> Iterator[dict[str, Any]]:
    bench = standing.benches[task]
    cells = BenchCell(standing.place, standing.model, standing.precision, task).searches()
    for name in dict.fromkeys((*standing.names, *cells)):
        measured, metrics = bench.of(name), request_metrics(bench, name)
        if measured is None or metrics is None:
            continue
        method, _, tuned_on = name.partition(TUNED_ON)
        found = standing.searches.get((tuned_on or task, method))
        yield {
            "model": standing.model,
            "precision": standing.precision,
            "task": task,
            "method": method,
            "tuned_on": (tuned_on or cells[name].task) if found is not None else None,
            "draft": measured.description,
            **_speedup_columns(standing, task, name),
            **metrics.model_dump(),
            "identical": sum(sample.identical for sample in measured.samples),
            "ties": sum(sample.tie for sample in measured.samples),
            "sequences": len(measured.samples),
            "counted": len(bench.counted),
            "keeps_plain": None if found is None else not found.claims_speedup,
            "trials": None if found is None else found.trials,
            "search_seconds": None if found is None else found.search_seconds,
            "distillation_seconds": None if found is None else found.distillation_seconds,
        }


def _speedup_columns(standing: Standing, task: str, name: str) -> dict[str, float | None]:
    columns: dict[str, float | None] = {}
    for phase in Phase:
        for reference in (PLAIN, STOCK):
            interval = standing.speedup(task, name, phase, reference)
            start = f"{phase.value}_over_{'generate' if reference == STOCK else reference}".replace(" ", "_")
            columns[start] = None if interval is None else interval.value
            columns[f"{start}_low"], columns[f"{start}_high"] = (None, None) if interval is None else interval.ci95
    return columns


def overall_figures(place: Place) -> list[dict[str, Any]]:
    """Return the geometric means of each contender over all tasks, by model and precision."""
    found = []
    for standing in standings(place):
        for name in standing.names:
            means = {phase: standing.overall(name, phase) for phase in Phase}
            found.append(
                {
                    "model": standing.model,
                    "precision": standing.precision,
                    "method": name,
                    **{phase.value.replace(" ", "_"): _plain_data(mean) for phase, mean in means.items()},
                    "decode_as_decided": _plain_data(standing.deployed(name)),
                }
            )
    return found


def _plain_data(mean: Overall) -> dict[str, Any] | None:
    return None if mean is None else {**mean[0].model_dump(mode="json"), "tasks": mean[1]}


def suite_csv(place: Place) -> str:
    """Return the lines of `figures` as CSV."""
    lines, file = figures(place), io.StringIO()
    if lines:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return file.getvalue()


def suite_json(place: Place, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the suite, the state of each cell and all figures; the samples stay in the records of the cells."""
    records = {cell.id: record_of(place, cell) for cell in cells}
    return {
        "suite": place.suite.model_dump(mode="json", exclude={"models"}),
        "cells": {
            name: None if record is None else record.model_dump(mode="json", exclude={"result", "id"})
            for name, record in records.items()
        },
        "figures": figures(place),
        "overall": overall_figures(place),
    }


def plan_table(place: Place, cells: Sequence[Cell], seconds: dict[str, float | None]) -> RenderableType:
    """Return the cells with their state and their estimated time, and the time that is left."""
    table = figures_table("cells of the suite", "cell", "state", "estimate")
    left, unknown = 0.0, 0
    for cell in cells:
        record, expected = record_of(place, cell), seconds[cell.id]
        state = "to run" if record is None else record.status
        if record is None or not record.is_done:
            left, unknown = left + (expected or 0.0), unknown + (expected is None)
        shown = f"{record.seconds / 60:.1f} min" if record is not None else _minutes(expected)
        table.add_row(Text(cell.id), state, shown)
    open_ended = f", and {unknown} searches without a limit" if unknown else ""
    return Group(table, Text(f"left: about {left / 3600:.1f} h (estimate){open_ended}"))


def _minutes(seconds: float | None) -> str:
    return "no limit" if seconds is None else f"about {seconds / 60:.1f} min"
