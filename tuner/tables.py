"""What tables for the terminal have in common."""

from __future__ import annotations

import re
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


class FactsGrid(Table):
    """Names and what is known under them, word for word: the path of a model may look like rich's markup."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row; text is printed verbatim."""
        super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def facts_grid() -> Table:
    """An empty grid of two columns: names, and facts."""
    facts = FactsGrid.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    return facts


def spaced(description: str) -> str:
    """A skip set that can be wrapped between indices."""
    return re.sub(r",(?=\d)", ", ", description)
