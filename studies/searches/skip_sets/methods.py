"""The registry of skip-set methods: names without imports, classes on first use.

To add a method, write one file with a `Method` and add one line to `METHODS`.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from studies.searches.skip_sets.contract import Method

METHODS: dict[str, str] = {
    "swift": "studies.searches.skip_sets.swift:Swift",
    "draft_verify": "studies.searches.skip_sets.draft_verify:DraftVerify",
    "tpe": "studies.searches.skip_sets.tpe:Tpe",
    "random": "studies.searches.skip_sets.random_sets:RandomSets",
    "odd_layers": "studies.searches.skip_sets.odd_layers:OddLayers",
}
"""`module:Class` by method name."""


def load_method(name: str) -> type[Method]:
    """Import and return the class of a method."""
    return cast("type[Method]", pkgutil.resolve_name(METHODS[name]))
