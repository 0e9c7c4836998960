"""The file of a suite: models, tasks, methods and baselines, as one frozen document.

Tasks and methods are settings of a search (`tuner.config.SearchConfig`): a setting is written once for all under `search`, or for
one task or one method. Later ones win in this order. With `tuning`, each method is searched once, for all tasks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from decoding.documents.strict_yaml import Document, read_mapping, suggest, validate
from decoding.runners import AUTO, PLAIN_RUNNER
from tuner.config import SearchConfig
from tuner.errors import ConfigError
from tuner.evaluation.suite.methods import METHODS
from tuner.fields import Names

Precision = Literal["float32", "bfloat16", "float16"]
Settings = dict[str, Any]
"""Keys of a search's configuration."""

BENCH = "bench"
"""Last part of the id of a comparison; no method has this name."""
TUNING = "tuning"
"""The data set of searches that serve all tasks, in the id of a cell; no task has this name then."""
PLAIN_BASELINES = ("plain-static", "plain-eager")
STOCK_BASELINES = ("hf", "hf-prompt-lookup", "hf-early-exit")
OWN_KEYS = ("model", "revision", "dtype", "storage", "tracking_uri", "experiment", "out", "heads")
"""Settings of a search that the suite sets for each cell."""
UNSUPPORTED: Mapping[str, Any] = {"batch_size": 1, "temperature": 0.0, "exact": "tokens"}
"""Settings that a suite leaves as they are: it decodes greedily, one sequence at a time."""
_NAME = re.compile(r"\w[\w.-]*")


def _by_name(value: Any) -> Any:
    """Return a list of names as a mapping of names to no settings."""
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return {name: {} for name in value}
    return {name: settings or {} for name, settings in value.items()} if isinstance(value, dict) else value


class SuiteModel(Document):
    """A model of the suite."""

    model: str = Field(description="folder or hub id")
    revision: str | None = None
    heads: Path | None = Field(None, description="folder of its exit heads; default: in the suite's folder")


class Suite(Document):
    """What is measured: every method on every task with every model, in every precision."""

    models: dict[str, SuiteModel] = Field(min_length=1)
    precisions: tuple[Precision, ...] = Field(("float32",), min_length=1)
    tasks: dict[str, Settings] = Field(min_length=1, description="the data set of each task, and settings for it alone")
    methods: Annotated[dict[str, Settings], BeforeValidator(_by_name)] = Field(
        default_factory=lambda: {name: dict[str, Any]() for name in METHODS},
        description="searches by name, with settings for each alone; default: all methods that have a name",
    )
    baselines: Names = Field(
        (*PLAIN_BASELINES, *STOCK_BASELINES), description="contenders of `sdtune bench` that need no search"
    )
    search_precision: Precision | None = Field(
        None, description="precision of all searches, whose drafts are then measured in each; default: search in each"
    )
    tuning: Settings | None = Field(
        None,
        description="data set on which each method is searched once, for all tasks; default: a search on every task",
    )
    transfer: Names = Field((), description="methods whose drafts are measured on the other tasks too")
    search: Settings = Field(default_factory=dict, description="settings of all searches")

    @classmethod
    def load(cls, path: Path) -> Suite:
        """Read a suite and check every setting in it. Raises `ConfigError` with the file and the wrong key."""
        suite = validate(cls, read_mapping(path, what="suite", error=ConfigError), source=str(path), error=ConfigError)
        suite.check(str(path))
        return suite

    def check(self, source: str) -> None:
        """Raise `ConfigError` for a setting of a search, a task or a method that is wrong or not theirs."""
        from tuner.bench.contenders import PROFILE, check_names

        for part, names in (("models", self.models), ("tasks", self.tasks), ("methods", self.methods)):
            _check_names(f"{source}: {part}", names)
        if self.search_precision not in (None, *self.precisions):
            raise ConfigError(
                f"{source}: search_precision: {self.search_precision!r} is not one of the precisions: "
                f"{', '.join(self.precisions)}"
            )
        if self.tuning is not None and self.transfer:
            raise ConfigError(f"{source}: transfer: with `tuning` every draft is measured where it was not tuned")
        if self.tuning is not None and TUNING in self.tasks:
            raise ConfigError(f"{source}: tasks: {TUNING!r} is the data set of all searches: rename the task")
        for name in self.transfer:
            if name not in self.methods:
                raise ConfigError(f"{source}: transfer: unknown method {name!r}; {suggest(name, self.methods)}")
        try:
            check_names(self.baselines)
        except ConfigError as cause:
            raise ConfigError(f"{source}: baselines: {cause}") from None
        for name in self.baselines:
            if name.startswith(PROFILE):
                raise ConfigError(
                    f"{source}: baselines: {name!r} needs a profile, and the suite has one for each method"
                )
        self._check_settings(source)

    @property
    def searched_tasks(self) -> tuple[str, ...]:
        """Tasks on which the methods are searched: `TUNING` alone if there is such a data set."""
        return tuple(self.tasks) if self.tuning is None else (TUNING,)

    def settings_of(self, task: str, method: str | None = None) -> Settings:
        """Return the settings of the searches on `task` by `method`: those of all, then the task's, then the method's."""
        of_task = self.tuning if task == TUNING and self.tuning is not None else self.tasks[task]
        parts: list[Mapping[str, Any]] = [{"runner": PLAIN_RUNNER}, self.search, of_task]
        if method is not None:
            parts += [METHODS.get(method, {}), self.methods[method]]
        return merged(parts)

    def _check_settings(self, source: str) -> None:
        common = {"dataset": "-", **self.search}
        _check(f"{source}: search", self.search, common)
        places = {f"tasks.{task}": settings for task, settings in self.tasks.items()}
        if self.tuning is not None:
            places[TUNING] = self.tuning
        for place, settings in places.items():
            if "dataset" not in {**self.search, **settings}:
                raise ConfigError(f"{source}: key '{place}.dataset' is missing")
            _check(f"{source}: {place}", settings, merged([common, settings]))
        for method, settings in self.methods.items():
            if method not in METHODS and "study" not in settings:
                raise ConfigError(
                    f"{source}: methods.{method}: unknown method; {suggest(method, METHODS)}; another one names its `study:`"
                )
            for task in self.searched_tasks:
                _check(
                    f"{source}: methods.{method}", settings, merged([{"dataset": "-"}, self.settings_of(task, method)])
                )


def merged(parts: Sequence[Mapping[str, Any]]) -> Settings:
    """Return settings in which later parts win; the mappings `studies` and `distillation` are merged key by key."""
    found: Settings = {}
    for part in parts:
        for key, value in part.items():
            before = found.get(key)
            if isinstance(before, Mapping) and isinstance(value, Mapping):
                found[key] = merged([before, value])
            else:
                found[key] = value
    return found


def _check_names(source: str, names: Mapping[str, Any]) -> None:
    for name in names:
        if _NAME.fullmatch(name) is None or name == BENCH:
            raise ConfigError(f"{source}: {name!r} is no name for a folder: use letters, digits, '.', '_' and '-'")


def _check(source: str, given: Settings, settings: Settings) -> None:
    """Raise `ConfigError` unless a search can have these `settings`; `given` are the ones written at this place."""
    for key in OWN_KEYS:
        if key in given:
            raise ConfigError(f"{source}: key {key!r} is set by the suite, for each cell")
    try:
        config = validate(SearchConfig, {"model": "-", **settings}, source=source, error=ConfigError)
    except ConfigError as cause:
        message = str(cause)  # settings of a study are checked apart, and name the study alone
        raise ConfigError(message if message.startswith(source) else f"{source}: {message}") from None
    for key, only in UNSUPPORTED.items():
        if getattr(config, key) != only:
            raise ConfigError(f"{source}: {key}: a suite is measured with {only}, got {getattr(config, key)!r}")
    if config.runner == AUTO:
        raise ConfigError(f"{source}: runner: a suite compares by one runner: name it, not {AUTO!r}")
