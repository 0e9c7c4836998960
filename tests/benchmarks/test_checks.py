"""A short run of the benchmarks that check searches, server and service, on tiny models: `pytest -n 0 -m benchmarks`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.integrity import coverage_rows
from benchmarks.steps import run_step
from decoding.drafts import LayerSkip
from tests.support.profiles import save_profile
from tests.support.tiny import WORDS, save_tiny_checkpoint

pytestmark = pytest.mark.benchmarks
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a benchmark, in a folder with a tiny model and prompts, and returns its results."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    save_tiny_checkpoint(tmp_path / "model")
    texts = [" ".join(WORDS[(7 * row + 3 * word) % 62] for word in range(8)) for row in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps({'prompt': text})}\n" for text in texts))

    def run(name: str, *arguments: str) -> dict[str, Any]:
        results = tmp_path / "results" / f"{name}.json"
        found = run_step(f"benchmarks.{name}", *arguments, "--threads", "1", results=results, timeout=900)
        assert "failed" not in found, results.with_suffix(".log").read_text()
        return found

    return run


def test_integrity(run: Run) -> None:
    small = ("tuning_prompts=6", "held_out_prompts=6", "max_new_tokens=12", "dtype=float32", "prompts_per_trial=3")
    settings = [part for each in small for part in ("--set", each)]
    sizes = [
        "--copies",
        "2",
        "--runs",
        "3",
        "--repetitions",
        "2",
        "--configurations",
        "3",
        "--passes",
        "3",
        "--max-tokens",
        "3",
    ]
    found = run("integrity", "--model", "model", "--dataset", "prompts.jsonl", *settings, *sizes)
    assert {name: len(runs) for name, runs in found["nulls"].items()} == {"disguised": 3, "idle": 3, "whole": 3}
    assert not any(each["claims"] for each in found["nulls"]["whole"])
    (every, *_) = coverage_rows(found["coverage"])
    assert (every["number"], every["intervals"]) == (3, 45)


def test_planted(run: Run) -> None:
    sizes = ["--blocks=1", "--precisions=0", "--large=1", "--layers=8", "--rivals=1", "--rival-trials=3"]
    sizes += ["--sizes", "5", "2", "1"]
    found = run("planted", *sizes)
    assert all(row["share"] >= 0.98 for row in found["small"])
    assert found["large"][0]["found"] == found["large"][0]["of"]
    assert all(row["joint has it after"] is not None for row in found["rivals"])


def test_hardening(run: Run) -> None:
    cases = "--command-lines 2 --documents 20 --data-sets 2 --sequences 4 --threaded-sequences 8 --decoding-threads 4"
    found = run("hardening", *cases.split(), "--faults", "0")
    assert not any(found["failures"].values())
    assert len(found["failures"]) == 6


def test_serving(run: Run) -> None:
    save_profile(Path("profile.yaml"), "model", LayerSkip.blocks([3, 4]))
    sizes = [
        "--prompts",
        "4",
        "--requests",
        "12",
        "--streams",
        "3",
        "--max-new-tokens",
        "4",
        "--levels",
        "1",
        "2",
        "--rounds",
        "2",
    ]
    found = run("serving", "profile.yaml", "prompts.jsonl", *sizes)
    assert (found["mixed"]["num_wrong"], found["mixed"]["is_idle"]) == (0, True)
    assert [row["wrong"] for row in found["throughput"]] == [0, 0]


def test_killed(run: Run) -> None:
    found = run("killed", "alone", "two on SQLite", "--trials", "12", "--kills", "1")
    assert found["failures"] == []
