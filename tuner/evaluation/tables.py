"""Shared parts of the evaluations' tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALL = "all"
"""Name of the group of all configurations, in tables by kind."""


def ratio_cell(ratio: Mapping[str, Any]) -> str:
    """Return a ratio, as plain data, with its 95 % interval and three decimals: of speeds that are nearly equal."""
    low, high = ratio["ci95"]
    return f"{ratio['value']:.3f} [{low:.3f}, {high:.3f}]"
