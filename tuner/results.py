"""Result files: where they may go, and how they are written."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from rich.console import Console, RenderableType

from decoding.documents.atomic_write import write_atomically
from tuner.errors import ConfigError

TEXT_WIDTH = 110


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
    """All figures and samples, whole or not at all; `ConfigError` if that fails."""
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
