"""Settings of `sdtune tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from tuner.fields import (
    ENGINE,
    OUTPUTS,
    PROBLEM,
    DatasetChoice,
    Dtype,
    EngineArgs,
    EngineHome,
    EngineName,
    NumRequests,
    PromptSettings,
    Revision,
    Seed,
    Threads,
    local_profile,
)


class WhatToTune(DatasetChoice):
    """Model, dataset and profile; a base of its own, so that they precede the other settings."""

    model: str | None = Field(
        None,
        description="Folder or hub id of a causal language model; default: the profile's.",
        json_schema_extra=PROBLEM,
    )
    profile: Annotated[Path | None, BeforeValidator(local_profile)] = Field(
        None,
        description="Tune the draft of this profile in the engine, in place of the engine's own.",
        json_schema_extra={**PROBLEM, "metavar": "FILE"},
    )


class TuneConfig(PromptSettings, WhatToTune):
    """Settings of a tuning in an engine."""

    revision: Revision = None
    engine: EngineName = Field(description="The engine that serves the model.", json_schema_extra=ENGINE)
    engine_home: EngineHome = None
    engine_args: EngineArgs = None
    draft_model: str | None = Field(
        None,
        description="Draft model of yours, as the engine loads it: a small model, or a head that vLLM knows; a .gguf file.",
        json_schema_extra={**ENGINE, "metavar": "PATH"},
    )
    sequences: tuple[NumRequests, ...] = Field(
        (1,), description="Tune for N requests side by side; may be repeated.", json_schema_extra=ENGINE
    )
    further_servers: int = Field(
        3,
        ge=0,
        description="Servers to start, at most, after the first one or two of each kind of draft.",
        json_schema_extra=ENGINE,
    )
    tuning_prompts: int = Field(
        12, ge=2, description="Prompts on which settings are chosen.", json_schema_extra=PROBLEM
    )
    held_out_prompts: int = Field(
        24, ge=2, description="Other prompts, on which the chosen one is measured.", json_schema_extra=PROBLEM
    )
    max_new_tokens: int = Field(64, ge=9, description="Tokens to generate.", json_schema_extra=PROBLEM)
    seed: Seed = 0
    dtype: Dtype = "auto"
    threads: Threads = None
    out: Path = Field(
        Path("tune"), description="Folder of the results.", json_schema_extra={**OUTPUTS, "metavar": "DIR"}
    )

    @model_validator(mode="after")
    def _one_draft(self) -> Self:
        if self.model is None and self.profile is None:
            raise ValueError("a model or a profile is needed: --model MODEL, or --profile FILE")
        if self.draft_model is not None and self.profile is not None:
            raise ValueError("draft_model and profile are both a draft: give one of them")
        return self
