"""Shared parts of tables for the terminal."""

from __future__ import annotations

import re
import textwrap
from copy import deepcopy
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

LONGEST_NAME = 17
"""Characters of a name beside which three intervals fit into 80 columns."""


class FiguresTable(Table):
    """Table of figures by name that prints text verbatim.

    Where it is too wide, long names take several lines, a word never does; then figures are broken.
    """

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(Text(str(cell)) for cell in cells), **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print the table, with its names in lines of `LONGEST_NAME` if it is too wide with whole ones."""
        table = self
        if self.__rich_measure__(console, options).maximum > options.max_width:
            table = deepcopy(self)
            for name in (cell for column in table.columns if column.no_wrap for cell in column.cells):
                assert isinstance(name, Text)
                name.plain = "\n".join(
                    textwrap.wrap(name.plain, LONGEST_NAME, break_long_words=False, break_on_hyphens=False)
                )
        yield from super(FiguresTable, table).__rich_console__(console, options)


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
        super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def facts_grid() -> Table:
    facts = FactsGrid.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    return facts


def spaced(description: str) -> str:
    """Add a space after each comma of a skip set to let it wrap."""
    return re.sub(r",(?=\d)", ", ", description)
