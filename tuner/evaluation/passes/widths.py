"""What a pass takes by the number of its positions and by the runner: why drafting pays more by one runner than by another.

Run as `python -m tuner.evaluation.passes.widths --model MODEL --out widths.json`. Runners are timed in turns, width
by width, in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decoding.runners import RUNNERS
from decoding.target import Target
from decoding.timing.stopwatch import Clock, Stopwatch, without_garbage_collection
from studies.measurement import paired_interval
from tuner.inputs.environment import device_name, versions
from tuner.inputs.models import load

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
CONTEXT = 256

Taken = dict[str, dict[int, list[float]]]
"""Seconds by runner and width, one a sweep."""


@torch.inference_mode()
def time_widths(
    targets: Mapping[str, Target],
    widths: Sequence[int] = WIDTHS,
    *,
    context: int = CONTEXT,
    num_sweeps: int = 24,
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> Taken:
    """Time a pass of the whole model of each width behind `context` random tokens, by each of `targets` in turn; a first sweep,
    which makes passes ready, is not counted. Each pass is run twice, and the second counts: it finds what it would in decoding.
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
        for _ in range(2):
            taken = watch.time(lambda: targets[name].forward(ids[:, context : context + width], caches[name], context))
        return taken

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
    """For each runner and width: the median seconds, and these over a pass of one position, and over eager's of as many."""
    rows = []
    for name, by_width in taken.items():
        for width, seconds in by_width.items():
            rows.append(
                {
                    "runner": name,
                    "width": width,
                    "median_seconds": statistics.median(seconds),
                    "over_one_position": _ratio(seconds, by_width[1]),
                    "over_eager": _ratio(seconds, taken["eager"][width]),
                }
            )
    return rows


def _ratio(seconds: Sequence[float], of: Sequence[float]) -> tuple[float, float, float]:
    """How many times as long, with the 95 % interval over sweeps, in pairs."""
    interval = paired_interval(np.array(seconds), np.array(of))
    return (interval.value, *interval.ci95)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--sweeps", type=int, default=24)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    loaded = load(arguments.model, dtype=arguments.dtype, device=arguments.device)
    targets = {name: Target(loaded.model, name) for name in RUNNERS}
    rows = summarise(time_widths(targets, num_sweeps=arguments.sweeps))
    document = {
        "model": arguments.model,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": device_name(loaded.model.device),
        "versions": versions(),
        "context": CONTEXT,
        "sweeps": arguments.sweeps,
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{'runner':8} {'positions':>9} {'ms':>8}  {'over one position':>20}  {'over eager':>20}")
    for row in rows:
        shown = ["{:.2f} [{:.2f}, {:.2f}]".format(*row[name]) for name in ("over_one_position", "over_eager")]
        print(f"{row['runner']:8} {row['width']:9} {1000 * row['median_seconds']:8.2f}  {shown[0]:>20}  {shown[1]:>20}")


if __name__ == "__main__":
    main()
