"""Result files: check of the folder, JSON and text output, and provenance: device, package versions, git revision."""

from __future__ import annotations

import io
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from rich.console import Console, RenderableType

from decoding.documents.atomic_write import write_atomically
from decoding.documents.strict_yaml import Document
from tuner.errors import ConfigError
from tuner.output_paths import check_folder_writable

REPORTED_PACKAGES = ("sdtune", "torch", "transformers", "optuna")
TEXT_WIDTH = 110


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect speed and results."""
    found = {"python": platform.python_version()}
    for package in REPORTED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed as a package"
    return found


def device_name(device: torch.device) -> str:
    """Return the accelerator's name, or the processor's with torch's number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()} ({threads} thread{'s' if threads > 1 else ''})"


def git_revision(folder: Path) -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class Provenance(Document):
    """Origin of a result file, stored in each under the key `provenance`."""

    revision: str | None = Field(description="git commit of the code; None outside a repository")
    command: str = Field(description="the command line, absolute paths reduced to their last part")
    date: str = Field(description="UTC, ISO 8601, when the file was written")
    device: str = Field(description="accelerator, or processor and number of threads")
    load: float | None = Field(description="load average of the last minute when the file was written; None if unknown")
    versions: dict[str, str] = Field(description="Python and the packages that decide speed and results")

    @classmethod
    def now(cls, device: torch.device) -> Provenance:
        """Return the provenance of a file written now, of measurements on `device`."""
        return cls(
            revision=git_revision(Path(__file__).parent),
            command=shlex.join([Path(sys.argv[0]).name, *map(public_name, sys.argv[1:])]),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            device=device_name(device),
            load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
            versions=versions(),
        )


def stamped(document: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {"provenance": Provenance.now(device).model_dump(mode="json"), **document}


def check_results_folder(out: Path) -> None:
    """Raise `ConfigError` unless results can be written into `out`, or into its parent to make it."""
    existing = check_folder_writable(out, what="results", error=ConfigError)
    if existing not in (out.absolute(), out.absolute().parent):
        raise ConfigError(f"cannot write results into {out}: there is no folder {out.parent}")


def public_name(source: str) -> str:
    """Return the last part of an absolute path, anything else unchanged.

    Results must not reveal the folders of this machine.
    """
    return Path(source).name if Path(source).is_absolute() else source


def plain_text(*shown: RenderableType, width: int = TEXT_WIDTH) -> str:
    text = io.StringIO()
    console = Console(width=width, color_system=None, file=text)
    for each in shown:
        console.print(each, highlight=False)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def write_result(out: Path, name: str, content: str) -> None:
    """Write one result file atomically; raise `ConfigError` if that fails."""
    try:
        out.mkdir(exist_ok=True)
    except OSError as cause:
        raise ConfigError(f"cannot create the folder {out}: {cause.strerror}") from None
    write_atomically(out / name, content.encode(), what="the results", error=ConfigError)
