"""Environment of a run: device, package versions, git revision."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

REPORTED_PACKAGES = ("sdtune", "torch", "transformers", "optuna")


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
    """Return the commit checked out at `folder`; None outside a repository or without git."""
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
