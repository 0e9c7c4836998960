"""Figures of the rows: speed-ups over all tasks, and what each kind adds to the best without it. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from decoding.profile import Interval
from studies.measurement import Measurement
from studies.ratios import Ratio, geometric_mean
from tuner.evaluation.kinds.document import KindRow

PLAIN = "plain decoding"


@dataclass(frozen=True)
class Addition:
    """The fastest row that uses a kind over the fastest that does not, on the same held-out prompts."""

    kind: str
    best_with: str
    best_without: str
    """Name of a row, or `PLAIN` if nothing else beats it."""
    ratio: Interval


def over_plain(measured: Measurement) -> Interval:
    """Return the speed-up over plain decoding: geometric mean over the tasks, as `over` does."""
    return over(measured, None)


def over(faster: Measurement, slower: Measurement | None) -> Interval:
    """Return the speed of one row over another's, or over plain decoding, paired by prompt.

    It is the geometric mean over the tasks, or the ratio over all prompts if a task has fewer than two.
    Raises ValueError unless both have the same two or more prompts in the same order.
    """
    prompts = [sample.prompt for sample in faster.samples]
    if slower is not None and [sample.prompt for sample in slower.samples] != prompts:
        raise ValueError("a ratio needs two measurements of the same prompts in the same order")
    tasks = faster.by_category()
    if not has_tasks(faster):
        return _ratio(faster, slower).interval()
    others = {} if slower is None else slower.by_category()
    return geometric_mean([_ratio(each, others.get(task)) for task, each in tasks.items()])


def has_tasks(measured: Measurement) -> bool:
    """Return True if every task has the two prompts that an interval needs, so that a mean over the tasks can be taken."""
    tasks = measured.by_category()
    return bool(tasks) and all(len(each.samples) > 1 for each in tasks.values())


def _ratio(faster: Measurement, slower: Measurement | None) -> Ratio:
    reference = faster.plain_decode if slower is None else slower.draft_decode
    return Ratio.of_speeds(reference, faster.draft_decode)


def mean_over_tasks(speedups: Iterable[float]) -> float:
    """Return the geometric mean of speed-ups, at least one."""
    logs = [math.log(each) for each in speedups]
    return math.exp(sum(logs) / len(logs))


def additions(rows: Sequence[KindRow]) -> list[Addition]:
    """Return what each kind adds: the best row that uses it over the best that does not, plain decoding included.

    Both are the fastest on the held-out prompts. A ratio below 1 says that the kind is in no setting that pays.
    """
    speedups = {row.name: over_plain(row.measurement).value for row in rows}
    kinds = dict.fromkeys(use for row in rows for use in row.uses)
    return [_addition(kind, rows, speedups) for kind in kinds]


def _addition(kind: str, rows: Sequence[KindRow], speedups: dict[str, float]) -> Addition:
    def speedup(row: KindRow) -> float:
        return speedups[row.name]

    best = max((row for row in rows if kind in row.uses), key=speedup)
    other = max((row for row in rows if kind not in row.uses), key=speedup, default=None)
    if other is None or speedup(other) <= 1.0:
        return Addition(kind, best.name, PLAIN, over(best.measurement, None))
    return Addition(kind, best.name, other.name, over(best.measurement, other.measurement))
