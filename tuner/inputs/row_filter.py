"""Rows of a dataset with given values in one column, as the end of a source names them: `questions.jsonl#task=math`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tuner.errors import DatasetError

_FILTER = re.compile(r"(?P<source>.+)#(?P<column>[^#=]+)=(?P<values>[^#]+)")
MOST_SHOWN = 12
"""Values that an error lists."""


@dataclass(frozen=True)
class RowFilter:
    """Rows whose value in `column`, as text, is one of `values`."""

    column: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"#{self.column}={'|'.join(self.values)}"

    def apply(self, rows: Any, name: str) -> Any:
        """Return the matching rows of a `datasets.Dataset`, in order; `name` is the dataset's, for errors.

        Raises `DatasetError` for a missing column, or a value that no row has.
        """
        if self.column not in rows.column_names:
            raise DatasetError(
                f"the dataset {name} has no column {self.column!r} to choose rows by; its columns are "
                f"{', '.join(rows.column_names)}"
            )
        found = [str(value) for value in rows.with_format(None)[self.column]]
        for value in self.values:
            if value not in found:
                raise DatasetError(
                    f"no row of the dataset {name} has {value!r} in its column {self.column!r}; values: {_listed(found)}"
                )
        return rows.select([index for index, value in enumerate(found) if value in self.values])


def split_filter(source: str) -> tuple[str, RowFilter | None]:
    """Return a source without its filter, and the filter if there is one: `#column=value`, or `#column=value|value`."""
    match = _FILTER.fullmatch(source)
    if match is None:
        return source, None
    return match["source"], RowFilter(match["column"].strip(), tuple(v.strip() for v in match["values"].split("|")))


def _listed(found: Sequence[str]) -> str:
    values = list(dict.fromkeys(found))
    shown = ", ".join(map(repr, values[:MOST_SHOWN]))
    return f"{shown} and {len(values) - MOST_SHOWN} more" if len(values) > MOST_SHOWN else shown
