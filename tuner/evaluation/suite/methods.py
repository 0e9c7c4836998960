"""The methods that a suite offers by name: settings of a search, as in the file of `sdtune search --config`.

A method of several studies is measured by the best draft of its last study; the earlier ones give that study its drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "conf_layers": {"study": ["conf_layers"]},
        "exit_layer": {"study": ["exit_layer"]},
        "ada_edl": {"study": ["exit_layer", "draft_length"], "studies": {"draft_length": {"rules": ["ada_edl"]}}},
        "swift": {"study": ["skip_sets"], "studies": {"skip_sets": {"method": "swift"}}},
        "draft_verify": {"study": ["skip_sets"], "studies": {"skip_sets": {"method": "draft_verify"}}},
        "joint": {"study": ["joint"]},
    }
)
"""To add a method, name it here, or give its `study:` in the suite's file."""
