"""What the tables of all evaluations have in common."""

from __future__ import annotations

from rich import box
from rich.table import Table

ALL = "all"
"""The group that holds every configuration, in tables by kind."""


def new_table(title: str, first: str, *headings: str) -> Table:
    """An empty table: a first column of names, and right-aligned columns of figures."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")  # a figure that is cut is none
    return table
