"""`sdtune generate`: one prompt, continued with a profile."""

from __future__ import annotations

from typing import Any

import click
from pydantic import Field

from tuner.cli.options import GroupedCommand, keys_of, options_of, settings_from
from tuner.cli.terminal import check_names, use_threads
from tuner.fields import DECODING, PROBLEM, ChatTemplate, ProfileSettings, Seed, SystemPrompt


class GenerateSettings(ProfileSettings):
    """Settings of `sdtune generate`."""

    prompt: str = Field(min_length=1, description="Text to continue.", json_schema_extra=PROBLEM)
    max_new_tokens: int = Field(128, ge=1, le=2**20, description="Most tokens to generate.", json_schema_extra=PROBLEM)
    chat_template: ChatTemplate = True
    system_prompt: SystemPrompt = None
    temperature: float | None = Field(
        None,
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="Sampling temperature; 0 is greedy; default: the profile's.",
        json_schema_extra=DECODING,
    )
    seed: Seed = 0
    compare: bool = Field(
        False,
        description="Also decode plainly; print both rates and whether the tokens are equal.",
        json_schema_extra=DECODING,
    )


@click.command(cls=GroupedCommand)
@keys_of(GenerateSettings)
@options_of(
    GenerateSettings,
    only=[name for name in GenerateSettings.model_fields if name != "chat_template"],
    position="profile",
)
def generate(**flags: Any) -> None:
    """Continue a prompt with a profile. The text streams to stdout, the rates go to stderr."""
    settings = settings_from(GenerateSettings, flags)
    check_names(profile=settings.profile, model=settings.model)

    from tuner.cli.generate_text import stream

    use_threads(settings.threads)
    stream(settings)
