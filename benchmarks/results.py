"""What every benchmark leaves: tables as plain text, all figures as JSON, and rows as CSV beside."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from decoding.profile import Interval
from studies.measurement import Measurement
from studies.ratios import Ratio
from tuner.results import stamped

Row = Mapping[str, Any]


def show(title: str, rows: Sequence[Row]) -> None:
    """Print rows as a table; the keys of all of them are its columns."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = [keys, *([_cell(row.get(key)) for key in keys] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else f"{value}"  # an interval in two decimals


def write(path: Path | None, facts: Row, rows: Sequence[Row] = (), *, device: torch.device | str = "cpu") -> None:
    """Write the facts with their provenance, and the rows as CSV beside; nothing without a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stamped(facts, torch.device(device)), indent=1) + "\n", encoding="utf-8")
    if rows:
        with path.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            table.writeheader()
            table.writerows(rows)


def ratio_interval(faster: Measurement, slower: Measurement) -> Interval:
    """Return the speed of one over the speed of the other, with its paired 95 % interval over prompts, the same of both."""
    assert [sample.prompt for sample in faster.samples] == [sample.prompt for sample in slower.samples]
    return Ratio.of_speeds(slower.draft_decode, faster.draft_decode).interval()
