"""Shared parts of the evaluations' tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

ALL = "all"
"""Name of the group of all configurations, in tables by kind."""


def new_table(title: str, first: str, *headings: str) -> Table:
    """Return an empty table: a first column of names, then right-aligned columns of figures."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")  # a truncated figure is useless
    return table


def ratio_cell(ratio: Mapping[str, Any]) -> str:
    """Return a ratio, as plain data, with its 95 % interval and three decimals: of speeds that are nearly equal."""
    low, high = ratio["ci95"]
    return f"{ratio['value']:.3f} [{low:.3f}, {high:.3f}]"
