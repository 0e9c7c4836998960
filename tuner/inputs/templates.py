"""Templates that turn the columns of a row into text: no code runs, braces name columns.

`Question: {question}` takes a column, `{turns[0]}` and `{translation[de]}` take elements of one; `{{` and `}}` are braces.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

_COLUMN = re.compile(r"(?P<name>[^\[\]]+)(?P<steps>(?:\[[^\[\]]+\])*)")


class Column(NamedTuple):
    """Column, or an element of its values: `question`, `turns[0]`, `translation[de]`."""

    name: str
    steps: tuple[int | str, ...] = ()

    @classmethod
    def parse(cls, written: str) -> Column:
        """Parse a name with optional bracketed steps; raise `ValueError` for anything else."""
        match = _COLUMN.fullmatch(written)
        if match is None:
            raise ValueError(f"{written!r} is not a column; write it as question, turns[0] or translation[de]")
        steps = re.findall(r"\[([^\[\]]+)\]", match["steps"])
        return cls(match["name"], tuple(int(step) if step.isdecimal() else step for step in steps))

    def read(self, row: Mapping[str, Any]) -> str:
        """Return the column's text in `row`, empty if missing.

        Raises `ValueError` if the value is not text.
        """
        value = row[self.name]
        for step in self.steps:
            if value is None or (isinstance(value, list) and isinstance(step, int) and step >= len(value)):
                return ""
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                raise ValueError(f"column {self.name!r} has no element [{step}]") from None
        if value is None:
            return ""
        if not isinstance(value, str):
            inside = f"; name an element of it, such as {self.name}[0]" if isinstance(value, list) else ""
            raise ValueError(f"column {self.name!r} holds {type(value).__name__}, not text{inside}")
        return value


@dataclass(frozen=True)
class Template:
    """Text with columns in braces, such as `Question: {question}`; literal braces are doubled."""

    parts: tuple[tuple[str, Column | None], ...]

    @classmethod
    def parse(cls, written: str) -> Template:
        """Parse a template; raise `ValueError` for unbalanced braces, formats or conversions."""
        parts = []
        for text, column, form, conversion in string.Formatter().parse(written):
            if form or conversion:
                raise ValueError(f"{{{column}}} takes no format and no conversion")
            parts.append((text, None if column is None else Column.parse(column)))
        return cls(tuple(parts))

    @property
    def columns(self) -> set[str]:
        """Names of the columns that the template reads."""
        return {column.name for _, column in self.parts if column}

    def render(self, row: Mapping[str, Any]) -> str:
        """Return the prompt of `row`, empty if a column is blank.

        Raises `ValueError` if a value is not text.
        """
        pieces = []
        for text, column in self.parts:
            value = column.read(row) if column else ""
            if column and not value.strip():
                return ""
            pieces.append(text + value)
        return "".join(pieces)
