"""Seconds of a pass of the whole model by its number of positions, with each runner in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import RenderableType
from transformers import PreTrainedModel

from decoding.garbage_collection import without_garbage_collection
from decoding.runners import RUNNERS
from decoding.target import Target
from decoding.timing.stopwatch import ReadSeconds, Stopwatch
from studies.ratios import paired_interval
from tuner.tables import figures_table

if TYPE_CHECKING:
    from tuner.evaluation.passes.settings import PassesEvaluation

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
"""Positions of a pass."""
CONTEXT = 256
"""Tokens in the cache before each pass."""

Taken = dict[str, dict[int, list[float]]]
"""Seconds by runner and width, one per sweep."""


def measure(model: PreTrainedModel, settings: PassesEvaluation) -> dict[str, Any]:
    """Time all widths with every registered runner and return one row per runner and width."""
    targets = {name: Target(model, name) for name in RUNNERS}
    taken = time_widths(targets, num_sweeps=settings.sweeps, seed=settings.seed)
    return {"context": CONTEXT, "sweeps": settings.sweeps, "rows": summarise(taken)}


@torch.inference_mode()
def time_widths(
    targets: Mapping[str, Target],
    widths: Sequence[int] = WIDTHS,
    *,
    context: int = CONTEXT,
    num_sweeps: int = 24,
    seed: int = 0,
    clock: ReadSeconds = time.perf_counter,
) -> Taken:
    """Time passes of each width after `context` random tokens, runner by runner in turns.

    A first sweep, which makes passes ready, is not counted. Each pass runs twice and the second run counts: it finds
    caches as decoding would.
    """
    any_target = next(iter(targets.values()))
    length = context + max(widths)
    stream = torch.Generator().manual_seed(seed)
    ids = torch.randint(any_target.config.vocab_size, (1, length), generator=stream).to(any_target.device)
    caches = {name: target.new_cache(length) for name, target in targets.items()}
    for name, target in targets.items():
        target.forward(ids[:, :context], caches[name], 0, last_only=True)
    watch = Stopwatch(any_target.device, clock)

    def seconds(name: str, width: int) -> float:
        def run() -> None:
            targets[name].forward(ids[:, context : context + width], caches[name], context)

        return [watch.time(run) for _ in range(2)][-1]

    found: Taken = {name: {width: [] for width in widths} for name in targets}
    with without_garbage_collection():
        for sweep in range(num_sweeps + 1):
            for width in widths:
                for name in targets:
                    taken = seconds(name, width)
                    if sweep:
                        found[name][width].append(taken)
    return found


def summarise(taken: Taken) -> list[dict[str, Any]]:
    """Return one row per runner and width: median seconds, and ratios to one position and to the eager runner."""
    return [
        {
            "runner": name,
            "width": width,
            "median_seconds": statistics.median(seconds),
            "over_one_position": _ratio(seconds, by_width[1]),
            "over_eager": _ratio(seconds, taken["eager"][width]),
        }
        for name, by_width in taken.items()
        for width, seconds in by_width.items()
    ]


def show(measured: Mapping[str, Any]) -> RenderableType:
    """Return the table of all rows."""
    table = figures_table(
        f"Passes after {measured['context']} tokens, 95 % intervals",
        "runner",
        "positions",
        "ms",
        "over one position",
        "over eager",
    )
    for row in measured["rows"]:
        ratios = ["{:.2f} [{:.2f}, {:.2f}]".format(*row[name]) for name in ("over_one_position", "over_eager")]
        table.add_row(row["runner"], str(row["width"]), f"{1000 * row['median_seconds']:.2f}", *ratios)
    return table


def _ratio(seconds: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of mean seconds and its 95 % interval over sweeps, in pairs."""
    interval = paired_interval(np.array(seconds), np.array(reference))
    return (interval.value, *interval.ci95)
