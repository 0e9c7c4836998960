"""What to try next: one module a search, each an Optuna study with its own space and its own way of proposing.

To add a study, write one file with a `Study` and its settings, and name the class in `STUDIES`.
"""

from __future__ import annotations

from studies.contract import Study
from studies.searches.conf_layers import ConfLayers
from studies.searches.draft_length import DraftLength
from studies.searches.exit_layer import ExitLayer
from studies.searches.joint import Joint
from studies.searches.predicted import Predicted
from studies.searches.skip_sets import SkipSets

STUDIES: dict[str, type[Study]] = {
    "conf_layers": ConfLayers,
    "exit_layer": ExitLayer,
    "draft_length": DraftLength,
    "predicted": Predicted,
    "joint": Joint,
    "skip_sets": SkipSets,
}

DEFAULT_STUDIES = ("joint",)
"""What a search runs unless it is told otherwise: all kinds of drafts under one budget. Others are asked for by name."""

__all__ = ["DEFAULT_STUDIES", "STUDIES"]
