"""Result files: where they may go, how they are written, and the stamp that says where they come from."""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from pydantic import Field
from rich.console import Console, RenderableType

from decoding.documents.atomic_write import write_atomically
from decoding.documents.strict_yaml import Document
from tuner.errors import ConfigError
from tuner.inputs.environment import device_name, git_revision, versions

TEXT_WIDTH = 110


class Provenance(Document):
    """Where a result file comes from. Every result file holds one, under the key `provenance`."""

    revision: str | None = Field(description="git commit of the code; None outside a repository")
    command: str = Field(description="the command line, absolute paths reduced to their last part")
    date: str = Field(description="UTC, ISO 8601, when the file was written")
    device: str = Field(description="accelerator, or processor and number of threads")
    load: float | None = Field(description="load average of the last minute when the file was written; None if unknown")
    versions: dict[str, str] = Field(description="Python and the packages that decide speed and results")

    @classmethod
    def now(cls, device: torch.device) -> Provenance:
        """Return the provenance of a file that this process writes now, of measurements on `device`."""
        return cls(
            revision=git_revision(Path(__file__).parent),
            command=shlex.join([Path(sys.argv[0]).name, *map(public_name, sys.argv[1:])]),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            device=device_name(device),
            load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
            versions=versions(),
        )


def stamped(document: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return `document` with its provenance in front."""
    return {"provenance": Provenance.now(device).model_dump(mode="json"), **document}


def check_results_folder(out: Path) -> Path:
    """Raise `ConfigError` if results could not be written into the folder `out`; where that is or will be made."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"cannot write results into {out}: it is a file; name a folder")
    place = out if out.is_dir() else out.parent
    try:
        with TemporaryFile(dir=place):
            pass
    except OSError as cause:
        raise ConfigError(f"cannot write results into {out}: {place}: {cause.strerror}") from None
    return place


def public_name(place: str) -> str:
    """The last part of an absolute path, anything else as it is: where things lie on this machine is nobody's business."""
    return Path(place).name if Path(place).is_absolute() else place


def write_json(out: Path, name: str, document: Mapping[str, Any]) -> None:
    """Write a `stamped` document whole or not at all. Raise `ConfigError` if that fails."""
    assert "provenance" in document, "a result says where it comes from"
    write_result(out, f"{name}.json", json.dumps(document, indent=1))


def write_text(out: Path, name: str, *shown: RenderableType, width: int = TEXT_WIDTH) -> None:
    """What the command shows at its end, as plain text of `width` columns; `ConfigError` if that fails."""
    text = io.StringIO()
    console = Console(width=width, color_system=None, file=text)
    for each in shown:
        console.print(each, highlight=False)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    write_result(out, f"{name}.txt", "\n".join(lines) + "\n")


def write_result(out: Path, name: str, content: str | bytes) -> None:
    """One file of the results, whole or not at all; `ConfigError` if that fails."""
    whole = content.encode() if isinstance(content, str) else content
    try:
        out.mkdir(exist_ok=True)
    except OSError as cause:
        raise ConfigError(f"cannot make the folder {out}: {cause.strerror}") from None
    write_atomically(out / name, whole, what="the results", error=ConfigError)
