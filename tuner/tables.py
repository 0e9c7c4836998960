"""Shared parts of tables for the terminal."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

LONGEST_NAME = 17
"""Characters of a name beside which three intervals fit into 80 columns; a longer name takes several lines."""


class FiguresTable(Table):
    """Table of figures by name that prints text verbatim. Where it is too wide, figures are broken; names never are, nor cut."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row of texts."""
        super().add_row(*map(self._cell, self.columns, map(str, cells)), **options)

    def _cell(self, column: Column, text: str) -> Text:
        return Text("\n".join(textwrap.wrap(text, LONGEST_NAME)) if column.no_wrap else text)


def figures_table(title: str, names: str | tuple[str, ...], *headings: str) -> Table:
    """Return an empty table: one or more columns of names, then right-aligned columns of figures."""
    table = FiguresTable(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1)
    )
    for heading in (names,) if isinstance(names, str) else names:
        table.add_column(Text(heading), no_wrap=True)
    for heading in headings:
        table.add_column(Text(heading), justify="right", overflow="fold")  # a figure that is cut is none
    return table


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
