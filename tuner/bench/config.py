"""Settings of `sdtune bench`, and those that exclude each other."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from tuner.errors import ConfigError
from tuner.fields import (
    DECODING,
    ENGINE,
    OUTPUTS,
    PROBLEM,
    DataSettings,
    EngineArgs,
    EngineHome,
    EngineName,
    Extra,
    Names,
    ProfileSettings,
    RunnerMode,
    Seed,
)

COMPARISON: Extra = {"group": "Comparison"}


class BenchConfig(DataSettings, ProfileSettings):
    """Settings of a bench; None means the profile's value, or the usual one where the profile has none."""

    tuning_prompts: int | None = Field(
        None, ge=1, description="As in the search; default: the profile's.", json_schema_extra=PROBLEM
    )
    held_out_prompts: int | None = Field(
        None,
        ge=2,
        description="Held-out prompts; default: those of the search, which more are not.",
        json_schema_extra=PROBLEM,
    )
    max_new_tokens: int | None = Field(
        None, ge=9, description="Tokens to generate; default: the profile's.", json_schema_extra=PROBLEM
    )
    seed: Seed = 0
    against: Names | None = Field(
        None,
        description="Contenders beside profile and plain, e.g. hf,hf-static,plain-eager; default: all hf ones, hf-static on CUDA "
        "only.",
        json_schema_extra={**COMPARISON, "metavar": "LIST"},
    )
    prompts: int | None = Field(
        None, ge=2, description="Held-out prompts to measure; default: all.", json_schema_extra=COMPARISON
    )
    batch_size: int = Field(
        1,
        ge=1,
        description="Prompts continued in lockstep; an incomplete last batch is skipped.",
        json_schema_extra=COMPARISON,
    )
    repeats: int = Field(1, ge=1, description="Times that every prompt is decoded.", json_schema_extra=COMPARISON)
    engine: EngineName | None = Field(
        None,
        description="Measure the profile's export in this engine, against the engine's own plain decoding.",
        json_schema_extra=ENGINE,
    )
    engine_home: EngineHome = None
    engine_args: EngineArgs = None
    runner: RunnerMode | None = Field(
        None,
        description="Runner of profile and plain; bitwise is static in bit-exact mode; default: the profile's.",
        json_schema_extra=DECODING,
    )
    out: Path = Field(
        Path("bench"), description="Folder of the results.", json_schema_extra={**OUTPUTS, "metavar": "DIR"}
    )


def check_bench_settings(config: BenchConfig) -> None:
    """Raise `ConfigError` for settings that exclude each other, before anything is loaded."""
    if config.engine is not None and (given := _given(config, "against", "batch_size")):
        raise ConfigError(
            f"{given} does not go with --engine: the engine runs the export; sdtune tune --profile measures requests side by side"
        )


def _given(config: BenchConfig, *names: str) -> str:
    """Return the flags of those settings that differ from their defaults."""
    found = [name for name in names if getattr(config, name) != BenchConfig.model_fields[name].get_default()]
    return ", ".join(f"--{name.replace('_', '-')}" for name in found)
