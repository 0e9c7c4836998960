"""Registry of the searches that can be compared; each is a study with settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from decoding.documents.strict_yaml import suggest, validate
from decoding.target import Target
from studies.contract import StudySettings
from studies.searches.registry import STUDIES, compared_searches
from tuner.config import SearchConfig
from tuner.errors import ConfigError


@dataclass(frozen=True)
class Rival:
    """One search in a comparison: a study and its settings."""

    name: str
    study: str
    settings: StudySettings


def rivals(names: Iterable[str], config: SearchConfig) -> tuple[Rival, ...]:
    """Return the named searches without repeats, in order; all of `compared_searches` by default.

    Settings come from `config`, updated with the name's own. Raises `ConfigError` for an unknown name.
    """
    known = compared_searches()
    found = []
    for name in dict.fromkeys(names or known):
        if name not in known:
            raise ConfigError(f"unknown search {name!r}; {suggest(name, known)}")
        study, changes = known[name]
        given = _changed(config.studies.get(study, {}), changes)
        settings = validate(STUDIES[study].load().Settings, given, source=f"studies.{study}", error=ConfigError)
        found.append(Rival(name, study, settings))
    return tuple(found)


def check(rival: Rival, target: Target) -> None:
    """Raise `ConfigError` unless the search can run on `target`."""
    try:
        rival.settings.check(target)
    except ValueError as cause:
        raise ConfigError(f"search {rival.name}: {cause}") from None


def _changed(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` updated with `changes`, merging nested mappings."""
    inner = {key: _changed(given.get(key, {}), value) for key, value in changes.items() if isinstance(value, Mapping)}
    return {**given, **changes, **inner}
