"""A step of a benchmark in a process of its own: it gives all memory back at its end, and may die without ending the benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_step(module: str, *arguments: str, results: Path, timeout: float | None = None) -> dict[str, Any]:
    """Run `python -m MODULE ARGUMENTS --json RESULTS` to its end; return its results, or its cause of failure as `failed`.

    What it prints goes into a log beside the results. Results that the same arguments have left are returned as they are, so that
    a benchmark that was stopped goes on: remove the file to run the step again.
    """
    command = [sys.executable, "-m", module, *arguments, "--json", str(results)]
    if results.exists() and (found := json.loads(results.read_text(encoding="utf-8")))["step"] == command[2:]:
        return found
    results.unlink(missing_ok=True)
    results.parent.mkdir(parents=True, exist_ok=True)
    log = results.with_suffix(".log")
    with log.open("w", encoding="utf-8") as output:
        try:
            code = subprocess.run(command, stdout=output, stderr=output, timeout=timeout, check=False).returncode
        except subprocess.TimeoutExpired:
            return {"failed": f"ended after {timeout:.0f} s"}
    if code or not results.exists():
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        cause = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return {"failed": f"exit status {code}: {cause[:600]}"}
    document = {"step": command[2:], **json.loads(results.read_text(encoding="utf-8"))}
    results.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return document
