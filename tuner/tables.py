"""Shared parts of tables for the terminal."""

from __future__ import annotations

import re
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


class FactsGrid(Table):
    """Grid that prints text verbatim: a model's path may look like rich markup."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row; text is printed verbatim."""
        super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def facts_grid() -> Table:
    """Return an empty grid with two columns, names and values."""
    facts = FactsGrid.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    return facts


def spaced(description: str) -> str:
    """Add a space after each comma of a skip set to let it wrap."""
    return re.sub(r",(?=\d)", ", ", description)
