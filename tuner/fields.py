"""Settings that several documents share, each with its help text and its group; profiles may be addresses in a model registry.

Imports pydantic only, so that `--help` stays fast.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from decoding.documents.strict_yaml import Document, Line
from decoding.runners import AUTO, RUNNERS

PROGRAMS: Mapping[str, str] = {
    "llama.cpp": "tuner.engines.llama_cpp:LlamaCppServer",
    "vllm": "tuner.engines.vllm:VllmServer",
}
"""`module:name` of each engine's class, by the name of its export."""


DEFAULT_STORE = "sqlite:///mlflow.db"
"""The MLflow store that a search uses by default."""


def local_profile(given: Any) -> Any:
    """Return the path of the downloaded profile for an address such as `models:/NAME@champion`, and anything else as it is.

    The registry is that of `MLFLOW_TRACKING_URI`, or the store that a search uses by default. Raises `ProfileError` if it does not
    have the profile.
    """
    if not str(given).startswith("models:/"):
        return given

    from decoding.deploy.registry import fetch_profile

    return fetch_profile(str(given), tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", DEFAULT_STORE))


Extra = dict[str, JsonValue]
PROBLEM: Extra = {"group": "Problem"}
BUDGET: Extra = {"group": "Search budget"}
DECODING: Extra = {"group": "Decoding"}
OUTPUTS: Extra = {"group": "Files and stores"}
ENGINE: Extra = {"group": "Engine"}
EXECUTOR: Extra = {"group": "Trials on several devices"}
"""Headings of `--help` under which fields are listed; a document whose fields are all under one names it as its `HEADING`."""


def split_names(value: Any) -> Any:
    """Return the names of a comma-separated text, or of several, as one tuple."""
    parts = (value,) if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return value
    return tuple(name.strip() for part in parts for name in part.split(","))


Names = Annotated[tuple[str, ...], BeforeValidator(split_names)]
Model = Annotated[Line, Field(description="Folder or hub id of a causal language model.", json_schema_extra=PROBLEM)]
Revision = Annotated[str | None, Field(description="Revision of the model on the hub.", json_schema_extra=PROBLEM)]
Dataset = Annotated[
    Line,
    Field(
        description="Prompts: a .jsonl, .json, .csv, .parquet or .txt file, a saved datasets folder, a hub id, or a preset; "
        "FILE#task=math reads only the rows with that value.",
        json_schema_extra=PROBLEM,
    ),
]
ChatTemplate = Annotated[
    bool, Field(description="Apply the tokenizer's chat template if it has one.", json_schema_extra=PROBLEM)
]
SystemPrompt = Annotated[
    str | None,
    Field(
        min_length=1,
        description="System prompt; it replaces the one of a conversation.",
        json_schema_extra={**PROBLEM, "escapes": True},
    ),
]
BITWISE = "bitwise"
"""Bit-exact mode of the runner that has one, as a choice beside the runners' names."""

if TYPE_CHECKING:
    RunnerWish = str
    RunnerMode = str
else:
    # The names come from the registry, so that a new runner is a choice of the flags without another list.
    RunnerWish = Literal[(AUTO, *RUNNERS)]
    RunnerMode = Literal[(*RUNNERS, BITWISE)]

_DTYPES = Literal["auto", "float32", "bfloat16", "float16"]
Dtype = Annotated[_DTYPES, Field(description="Precision of the weights.", json_schema_extra=DECODING)]
Device = Annotated[
    str,
    Field(
        description="Device: auto, cpu, cuda, cuda:1 ...; spread: all GPUs together (eager, needs accelerate).",
        json_schema_extra=DECODING,
    ),
]
Threads = Annotated[
    int | None,
    Field(
        ge=1,
        le=4096,
        description="CPU threads of torch; a small model is fastest with one; default: torch's own.",
        json_schema_extra=DECODING,
    ),
]
Seed = Annotated[
    int,
    Field(
        ge=0, le=2**32 - 1, description="Seed of the split, the samplers and the sampling.", json_schema_extra=PROBLEM
    ),
]
if TYPE_CHECKING:
    EngineName = str
else:
    # From the registry, so that a new engine is a choice without another list.
    EngineName = Literal[tuple(PROGRAMS)]

NumRequests = Annotated[int, Field(ge=1, le=1024)]
EngineHome = Annotated[
    Path | None,
    Field(
        description="llama.cpp's sources, or vLLM's virtual environment; default: LLAMA_CPP or SDTUNE_VLLM.",
        json_schema_extra={**ENGINE, "metavar": "DIR"},
    ),
]
EngineArgs = Annotated[
    str | None,
    Field(
        description="Flags for the engine, with and without a draft, as one text.",
        json_schema_extra={**ENGINE, "metavar": "FLAGS"},
    ),
]


class ProfileSettings(Document):
    """Profile that a command works with, and how its model is loaded; None means the profile's value."""

    profile: Annotated[Path, BeforeValidator(local_profile)] = Field(
        description="Profile that `sdtune search` wrote, or models:/NAME@ALIAS.",
        json_schema_extra={**PROBLEM, "metavar": "FILE"},
    )
    model: str | None = Field(
        None, description="Folder or hub id of the model; default: the profile's.", json_schema_extra=PROBLEM
    )
    dtype: _DTYPES | None = Field(
        None, description="Precision of the weights; default: the profile's.", json_schema_extra=DECODING
    )
    device: Device = "auto"
    threads: Threads = None


class PromptSettings(Document):
    """Conversion of rows into prompts; each field is a key of the configuration and a flag of the same name."""

    preset: str | None = Field(
        None,
        description="Preset whose format to use, for a copy of its dataset; default: the dataset's, if it is a preset.",
        json_schema_extra={**PROBLEM, "metavar": "NAME"},
    )
    prompt_column: str | None = Field(
        None,
        description="Column that holds the prompt or the conversation; default: guessed.",
        json_schema_extra={**PROBLEM, "metavar": "COLUMN"},
    )
    template: str | None = Field(
        None,
        description="Format of a prompt, columns in braces, such as 'Question: {question}\\nAnswer:'.",
        json_schema_extra={**PROBLEM, "escapes": True},
    )
    system_prompt: SystemPrompt = None
    group_column: str | None = Field(
        None,
        description="Column of a group, such as a source file; no group is split between tuning and held-out prompts.",
        json_schema_extra={**PROBLEM, "metavar": "COLUMN"},
    )
    category_column: str | None = Field(
        None,
        description="Column of a prompt's category, for figures by category; default: category, task or subset, if there is one.",
        json_schema_extra={**PROBLEM, "metavar": "COLUMN"},
    )
    chat_template: ChatTemplate = True
    max_prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="Cut longer prompts from the left; default: prompts that do not fit the context are left out.",
        json_schema_extra=PROBLEM,
    )

    @model_validator(mode="after")
    def _one_format(self) -> PromptSettings:
        if self.template is not None and self.prompt_column is not None:
            raise ValueError("prompt_column and template both say what a prompt is: give one of them")
        return self


class DatasetChoice(Document):
    """Dataset alone; a base of its own, so that it precedes the other settings."""

    dataset: Dataset


class DataSettings(PromptSettings, DatasetChoice):
    """Dataset and the conversion of its rows into prompts."""


DATA_FIELDS = tuple(DataSettings.model_fields)
"""Names of the settings, for commands that take them from a larger document."""
