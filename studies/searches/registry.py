"""The registry of studies: names without imports, classes on first use.

To add a study, write one file with a `Study` and add one line to `STUDIES`. A sampler of Optuna is a study by its name:
`optuna:GPSampler`.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from decoding.documents.strict_yaml import suggest

if TYPE_CHECKING:
    from studies.contract import Problem, Study


@dataclass(frozen=True)
class StudyEntry:
    """A registered study, which can be listed without importing torch or Optuna."""

    reference: str
    """`module:Class`, imported by `load`."""

    def load(self) -> type[Study]:
        """Import and return the class."""
        return cast("type[Study]", pkgutil.resolve_name(self.reference))


STUDIES: dict[str, StudyEntry] = {
    "joint": StudyEntry("studies.searches.joint:Joint"),
    "conf_layers": StudyEntry("studies.searches.conf_layers:ConfLayers"),
    "conf_layers_tuned": StudyEntry("studies.searches.conf_layers_tuned:ConfLayersTuned"),
    "exit_layer": StudyEntry("studies.searches.exit_layer:ExitLayer"),
    "draft_length": StudyEntry("studies.searches.draft_length:DraftLength"),
    "tpe": StudyEntry("studies.searches.by_sampler:TpeSearch"),
    "random": StudyEntry("studies.searches.by_sampler:RandomSearch"),
}

DEFAULT_STUDIES = ("joint",)
"""Studies that a search runs unless others are named: all kinds of drafts under one budget."""


def load_study(name: str) -> type[Study]:
    """Import and return the class of a study. Raises ValueError for a name that is no study, with those that are."""
    if name in STUDIES:
        return STUDIES[name].load()
    if name.startswith("optuna:"):
        from studies.searches.by_sampler import study_of

        return study_of(name)
    raise ValueError(f"unknown study {name!r}; {suggest(name, STUDIES)}, optuna:NAME for a sampler of Optuna")


def create_study(name: str, problem: Problem, settings: Any, kept: Any = None) -> Study:
    """Return the study `name` with its limits applied.

    `settings` is an instance of the study's `Settings`, `kept` the stored `StudySetup.kept` of a study that is resumed.
    Raises ValueError if the problem lacks something that the study needs.
    """
    from studies.limits import Limited

    return Limited(load_study(name).create(problem, settings, kept), settings.max_trials, settings.idle_limit)
