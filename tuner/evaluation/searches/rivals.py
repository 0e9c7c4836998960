"""The searches that can be compared, by name: each is a study with settings. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from decoding.documents.strict_yaml import suggest, validate
from decoding.target import Target
from studies.contract import StudySettings
from studies.searches.registry import STUDIES, compared_searches
from tuner.config import SearchConfig
from tuner.errors import ConfigError

SEARCHES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(compared_searches())
"""By search name: a study, and the settings in which the search differs from the study's own."""


@dataclass(frozen=True)
class Rival:
    """One search of a comparison."""

    name: str
    study: str
    settings: StudySettings


def rivals(names: Iterable[str], config: SearchConfig) -> tuple[Rival, ...]:
    """The named searches, each once and in this order, all of `SEARCHES` if none is named; their settings are those of
    `config`, changed by what the name says. Raises `ConfigError` for a name that is none."""
    found = []
    for name in dict.fromkeys(names or SEARCHES):
        if name not in SEARCHES:
            raise ConfigError(f"unknown search {name!r}; {suggest(name, SEARCHES)}")
        study, changes = SEARCHES[name]
        given = _changed(config.studies.get(study, {}), changes)
        settings = validate(STUDIES[study].load().Settings, given, source=f"studies.{study}", error=ConfigError)
        found.append(Rival(name, study, settings))
    return tuple(found)


def check(rival: Rival, target: Target) -> None:
    """Raise `ConfigError` for a search that this model has nothing for."""
    try:
        rival.settings.check(target)
    except ValueError as cause:
        raise ConfigError(f"search {rival.name}: {cause}") from None


def _changed(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with `changes`, mappings within it key by key."""
    inner = {key: _changed(given.get(key, {}), value) for key, value in changes.items() if isinstance(value, Mapping)}
    return {**given, **changes, **inner}
