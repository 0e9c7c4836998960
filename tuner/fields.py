"""Types of settings that several documents share, each with its help text and its group.

Imports pydantic only, so that `--help` stays fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue

from decoding.documents.strict_yaml import Line
from decoding.runners import AUTO, RUNNERS
from tuner.engine_programs import PROGRAMS
from tuner.profile_address import local_profile

Extra = dict[str, JsonValue]
PROBLEM: Extra = {"group": "Problem"}
BUDGET: Extra = {"group": "Search budget"}
TRAINING: Extra = {"group": "Training"}
DECODING: Extra = {"group": "Decoding"}
OUTPUTS: Extra = {"group": "Files and stores"}
ENGINE: Extra = {"group": "Engine"}
EXECUTOR: Extra = {"group": "Trials on several devices"}
"""Headings of `--help` under which fields are listed."""


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
Profile = Annotated[
    Path,
    BeforeValidator(local_profile),
    Field(
        description="Profile that `sdtune search` wrote, or models:/NAME@ALIAS.",
        json_schema_extra={**PROBLEM, "metavar": "FILE"},
    ),
]
ProfileModel = Annotated[
    str | None,
    Field(description="Folder or hub id of the model; default: the profile's.", json_schema_extra=PROBLEM),
]
ProfileDtype = Annotated[
    _DTYPES | None,
    Field(description="Precision of the weights; default: the profile's.", json_schema_extra=DECODING),
]

if TYPE_CHECKING:
    EngineName = str
else:
    # From the registry, so that a new engine is a choice without another list.
    EngineName = Literal[tuple(PROGRAMS)]

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
