"""The studies: Optuna samplers over one space, one file each, and their registry.

To add one, write a file with a `StudySampler` and add a line to `SAMPLERS`. A sampler of Optuna is a study by its name:
`optuna:GPSampler`. Names are known without importing torch or Optuna.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any, cast

from decoding.documents.strict_yaml import suggest

if TYPE_CHECKING:
    from studies.samplers.contract import StudySampler

OPTUNA = "optuna:"
"""What the name of a study begins with that is a class of `optuna.samplers`."""

SAMPLERS = {
    "joint": "studies.samplers.joint:Joint",
    "conf_layers": "studies.samplers.conf_layers:ConfLayers",
    "conf_layers_tuned": "studies.samplers.conf_layers_tuned:ConfLayersTuned",
    "exit_layer": "studies.samplers.exit_layer:ExitLayer",
    "draft_length": "studies.samplers.draft_length:DraftLength",
    "tpe": "studies.samplers.by_optuna:TpeSearch",
    "random": "studies.samplers.by_optuna:RandomSearch",
}

DEFAULT_STUDIES = ("joint",)
"""Studies that a search runs unless others are named: all kinds of drafts under one budget."""


def load_sampler(name: str) -> type[StudySampler]:
    """Import and return the class of a study. Raises ValueError for a name that is no study, with those that are."""
    found: Any
    if name in SAMPLERS:
        found = pkgutil.resolve_name(SAMPLERS[name])
    elif name.startswith(OPTUNA):
        found = pkgutil.resolve_name("studies.samplers.by_optuna:named")(name)
    else:
        raise ValueError(f"unknown study {name!r}; {suggest(name, SAMPLERS)}, {OPTUNA}NAME for a sampler of Optuna")
    return cast("type[StudySampler]", found)
