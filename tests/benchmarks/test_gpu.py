"""Two steps of the benchmark of a GPU on a CPU, and steps whose process dies: `pytest -n 0 -m benchmarks`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import read_record, run_steps
from tests.support.paths import ROOT

pytestmark = pytest.mark.benchmarks

# Writes the record of its first step, then dies in the second one.
WORKER = """
import json, os, pathlib, signal, sys
order = json.loads(sys.argv[1])
steps = list(order["steps"])
folder = pathlib.Path(order["out"], "steps")
folder.mkdir(exist_ok=True)
(folder / f"{steps[0]}.json").write_text('{"status": "ok"}')
if len(steps) > 1:
    (folder / f"{steps[1]}.json").write_text('{"status": "running"}')
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_step_survives_the_failure_of_another(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--device",
        "cpu",
        "--preset",
        "demo",
        "--stretch",
        "9",
        "--threads",
        "1",
    ]
    command += ["--out", str(tmp_path), "--step", "environment", "--step", "bench-1", "--step", "attention"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 1, found.stderr
    steps = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert [steps[name]["status"] for name in ("environment", "bench-1", "attention")] == ["ok", "failed", "ok"]
    assert "the search wrote none" in steps["bench-1"]["cause"]
    assert "chosen by torch" in found.stdout


def test_steps_after_the_death_of_their_process_run_in_a_fresh_one(tmp_path: Path) -> None:
    worker = (sys.executable, "-c", WORKER)
    assert run_steps(tmp_path, dict.fromkeys("abcd", 60.0), 240.0, {"out": str(tmp_path)}, worker) == []
    records = [read_record(tmp_path, name) for name in "abcd"]
    assert [record["status"] for record in records if record] == ["ok", "died", "ok", "died"]
    assert run_steps(tmp_path, dict.fromkeys("abcd", 60.0), 0.0, {}) == ["b", "d"], "what failed runs again"
