"""Layer indices in documents: `[7, 9, "12-15"]` in YAML, a tuple of ints in Python."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

# Far above any real model: a slip such as 12-1500000000 is refused before the range is expanded.
MOST_LAYERS = 10_000


def parse_indices(value: Any) -> Any:
    """Return layer indices from `[7, 9, "12-15"]` or the string `"7,9,12-15"`: ascending, without duplicates.

    Raises ValueError for anything else.
    """
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple | set | frozenset):
        raise ValueError(f"must be a list of layer indices such as [7, 9, 12-15], got {value!r}")
    return tuple(sorted({index for part in parts for index in _expand(part)}))


def _expand(part: Any) -> range:
    if isinstance(part, int) and not isinstance(part, bool) and part < 0:
        raise ValueError(f"a layer index counts from 0, got {part}")
    written = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", str(part).strip())
    if written is None:
        raise ValueError(f"must hold layer indices such as 7 or 12-15, got {part!r}")
    first, last = int(written[1]), int(written[2] or written[1])
    if last < first:
        raise ValueError(f"the range {part!r} runs backwards")
    if last >= MOST_LAYERS:
        raise ValueError(f"a layer index is below {MOST_LAYERS}, got {part!r}")
    return range(first, last + 1)


def format_indices(indices: tuple[int, ...]) -> list[int | str]:
    """Return the inverse of `parse_indices`: runs of three or more indices become `first-last`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [item for run in runs for item in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else run)]


def compact_indices(indices: tuple[int, ...]) -> str:
    """Return indices for a table, such as `7,9,12-15`, or `-` for none."""
    return ",".join(str(item) for item in format_indices(indices)) or "-"


Layers = Annotated[
    tuple[int, ...],
    BeforeValidator(parse_indices, json_schema_input_type=list[int | str] | str),
    PlainSerializer(format_indices, return_type=list[int | str]),
]
"""A document key that holds layer indices."""
