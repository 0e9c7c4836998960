"""The registry of engines: modules that are named here, and YAML files in `configs/engines` with templates of settings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from importlib import resources
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from pydantic import Field

from decoding.documents.strict_yaml import Document, read_mapping, validate
from tuner.errors import ExportError
from tuner.export.engines.contract import Engine
from tuner.export.engines.vllm import refuse_mtp

if TYPE_CHECKING:
    from tuner.export.plan import Plan

FOLDER = "configs.engines"


class SettingsFiles(Document):
    """Files of settings for one sort of draft."""

    files: dict[str, str] = Field(
        description="Jinja template of each file, with the plan's `model`, `draft`, `dtype`, `num_tokens`, `threshold`, `lookup` "
        "and `schedule`"
    )
    draft_generation: str = Field("{}", description="likewise: JSON of keys for the draft's `generation_config.json`")
    notes: tuple[str, ...] = Field((), description="what differs in this engine, one sentence each")


class EngineFile(Document):
    title: str
    version: str = Field(description="version whose options are written, and how they were checked")
    draft_model: SettingsFiles
    lookup: SettingsFiles | None = Field(None, description="of a lookup alone; None for an engine without one")
    has_automaton: bool = Field(False, description="whether a lookup alone may be a suffix automaton or a trie")
    stops_below: bool = Field(False, description="whether it ends a draft at an unlikely token")
    reads_layer_lists: bool = Field(False, description="whether it takes each layer's settings from the configuration")
    has_schedule: bool = Field(False, description="whether the number of tokens may depend on the number of sequences")
    refuses_mtp: bool = Field(False, description="whether families with multi-token prediction layers are refused")


def data_engines() -> list[str]:
    names = (file.name for file in resources.files(FOLDER).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


class DataEngine(Engine):
    """An engine by its file; raises `ExportError` for a file that is not valid."""

    def __init__(self, name: str) -> None:
        with resources.as_file(resources.files(FOLDER) / f"{name}.yaml") as path:
            data = read_mapping(path, what="engine", error=ExportError)
        self._file = validate(EngineFile, data, source=f"engine {name}", error=ExportError)
        self.title, self.version = self._file.title, self._file.version
        self.looks_up_alone, self.has_schedule = self._file.lookup is not None, self._file.has_schedule
        self.stops_below, self.reads_layer_lists = self._file.stops_below, self._file.reads_layer_lists
        self.has_automaton = self._file.has_automaton

    def check(self, plan: Plan, config: Any) -> None:
        if self._file.refuses_mtp and plan.shape is not None:
            refuse_mtp(config, self.title)

    def notes(self, plan: Plan) -> list[str]:
        return list(self._settings(plan).notes)

    def draft_generation(self, plan: Plan) -> dict[str, Any]:
        return dict(json.loads(self._rendered(self._settings(plan).draft_generation, plan)))

    def files(self, plan: Plan) -> dict[str, str]:
        return {name: self._rendered(text, plan) for name, text in self._settings(plan).files.items()}

    def _rendered(self, template: str, plan: Plan) -> str:
        import jinja2

        environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        environment.filters["quote"] = shlex.quote
        facts = {
            "model": plan.model,
            "draft": str(plan.draft),
            "dtype": plan.dtype,
            "num_tokens": plan.length.num_tokens,
            "threshold": plan.threshold,
            "lookup": plan.lookup,
            "schedule": plan.schedule,
        }
        return environment.from_string(template).render(facts)

    def _settings(self, plan: Plan) -> SettingsFiles:
        settings = self._file.draft_model if plan.shape is not None else self._file.lookup
        assert settings is not None, "an engine without lookups was refused"
        return settings


IN_CODE: Mapping[str, str] = {
    "vllm": "tuner.export.engines.vllm:Vllm",
    "llama.cpp": "tuner.export.engines.llama_cpp:LlamaCpp",
}
"""`module:name` of the class of each engine that needs code."""
ENGINES = (*IN_CODE, *data_engines())
"""Names of all engines."""


def load_engine(name: str) -> Engine:
    return resolve_name(IN_CODE[name])() if name in IN_CODE else DataEngine(name)
