"""The cells of a suite in order, and an estimate of their time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache

from tuner.errors import ConfigError
from tuner.evaluation.suite.bench_cell import BenchCell
from tuner.evaluation.suite.contract import Cell, Place, record_of
from tuner.evaluation.suite.document import TUNING
from tuner.evaluation.suite.heads_cell import HeadsCell
from tuner.evaluation.suite.search_cell import SearchCell

LOADING_SECONDS = 15.0
"""Assumed seconds to start a process and to load a model."""
OVERHEAD = 1.5
"""Assumed seconds of plain decoding over the time to read the weights, where nothing has been measured."""


def cells_of(place: Place) -> list[Cell]:
    """Return the cells in the order in which they run: heads, then by precision and task the searches and the comparison.

    The searches on a data set for all tasks come before the first comparison. If drafts are measured on other tasks too, the
    comparisons of a precision come after all its searches.
    """
    return [cell for model in place.suite.models for cell in _of_model(place, model)]


def _of_model(place: Place, model: str) -> Iterator[Cell]:
    suite, heads = place.suite, HeadsCell(place, model)
    if suite.methods and heads.is_wanted:
        yield heads
    for precision in sorted(
        suite.precisions, key=lambda each: each != suite.search_precision
    ):  # the searched one first
        benches = [BenchCell(place, model, precision, task) for task in suite.tasks]
        for task in suite.searched_tasks:
            if suite.search_precision in (None, precision):
                for method in suite.methods:
                    yield SearchCell(place, model, precision, task, method)
            if not suite.transfer:
                yield from [bench for bench in benches if task in (bench.task, TUNING)]
        if suite.transfer:
            yield from benches


def chosen(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """Return the cells whose ids match a pattern such as `*/float32/math/*`; all if there are no patterns.

    Raises `ConfigError` for a pattern that fits no cell.
    """
    for pattern in patterns:
        if not any(fnmatchcase(cell.id, pattern) for cell in cells):
            raise ConfigError(
                f"--only {pattern}: no cell has such an id; the first is {cells[0].id}, the last {cells[-1].id}"
            )
    return [cell for cell in cells if not patterns or any(fnmatchcase(cell.id, pattern) for pattern in patterns)]


def cell_named(place: Place, cell_id: str) -> Cell:
    """Return the cell with an id. Raises KeyError if the suite has none."""
    return {cell.id: cell for cell in cells_of(place)}[cell_id]


def estimates(place: Place, cells: Sequence[Cell]) -> Mapping[str, float | None]:
    """Return the estimated seconds of each cell by its id, or None for a search without any limit.

    They are the limits of searches, and tokens times the seconds of a plain token.
    The seconds of a token are those of the comparisons so far, or else derived from the size of the weights and the memory
    bandwidth of this device. Reads the configurations of the models only.
    """

    @cache
    def seconds_per_token(model: str, precision: str) -> float:
        measured = _measured_seconds(place, model, precision)
        return measured if measured is not None else _assumed_seconds(place, model, precision)

    return {cell.id: _estimate(cell, seconds_per_token(cell.model, cell.precision)) for cell in cells}


def _estimate(cell: Cell, seconds_per_token: float) -> float | None:
    size = cell.size()
    return LOADING_SECONDS + size.seconds + size.tokens * seconds_per_token if size.is_limited else None


def _measured_seconds(place: Place, model: str, precision: str) -> float | None:
    """Return the mean seconds of a comparison per token that it decoded at most, or None if there was none."""
    seconds, tokens = 0.0, 0
    for task in place.suite.tasks:
        bench = BenchCell(place, model, precision, task)
        record = record_of(place, bench)
        if record is not None and record.is_done:
            seconds, tokens = seconds + record.seconds, tokens + bench.size().tokens
    return seconds / tokens if tokens else None


def _assumed_seconds(place: Place, model: str, precision: str) -> float:
    from tuner.evaluation.gpu.roofline import measure_bandwidth
    from tuner.inputs.memory import size_of_checkpoint
    from tuner.inputs.models import resolve_device

    device = str(place.suite.search.get("device", "auto"))
    entry = place.suite.models[model]
    size = size_of_checkpoint(entry.model, revision=entry.revision, dtype=precision, device=device)
    bandwidth = measure_bandwidth(resolve_device(device))
    return OVERHEAD * size.weight_bytes / bandwidth.bytes_per_second
