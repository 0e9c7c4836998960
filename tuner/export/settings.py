"""Settings of `sdtune export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tuner.export.engines.registry import ENGINES
from tuner.fields import (
    ENGINE,
    OUTPUTS,
    Device,
    ProfileSettings,
)

FOLDER = "folder"

if TYPE_CHECKING:
    Destination = str
else:
    # From the registries, so that a new engine is a choice without another list.
    Destination = Literal[(FOLDER, *ENGINES)]


class ExportSettings(ProfileSettings):
    """Settings of an export; None means the profile's value."""

    to: Destination = Field(description="Where the profile is to run.", json_schema_extra=ENGINE)
    out: Path = Field(description="Folder of the export.", json_schema_extra={**OUTPUTS, "metavar": "DIR"})
    draft_tokens: int | None = Field(
        None,
        ge=1,
        le=64,
        description="Tokens to draft per round, where the engine drafts a fixed number; default: the profile's average.",
        json_schema_extra=ENGINE,
    )
    schedule: Path | None = Field(
        None,
        description="tune.json of `sdtune tune --profile`: its schedule of tokens to draft by number of sequences.",
        json_schema_extra={**ENGINE, "metavar": "FILE"},
    )
    drop: tuple[Literal["bits"], ...] = Field(
        (), description="Export a quantised draft with the model's own weights.", json_schema_extra=ENGINE
    )
    device: Device = "cpu"
    copy_weights: bool = Field(
        False,
        description="Copy the model's weights into a `folder`; default: links to them.",
        json_schema_extra=OUTPUTS,
    )
    overwrite: bool = Field(False, description="Replace an earlier export in --out.", json_schema_extra=OUTPUTS)
