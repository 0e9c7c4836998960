"""A short run of each benchmark on a tiny model: `pytest -n 0 -m benchmarks`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.steps import run_step

pytestmark = pytest.mark.benchmarks


def test_a_step_that_fails_says_why(tmp_path: Path) -> None:
    found = run_step("benchmarks.steps", results=tmp_path / "nothing.json")
    assert found == {"failed": "exit status 0: no output"}
