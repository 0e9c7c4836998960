"""The benchmark of one GPU, without one: its steps are commands that there are, and what becomes of each is told."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from rich.console import Console

from tuner.bench.contenders import check_names
from tuner.cli.evaluate import evaluate
from tuner.cli.main import main
from tuner.evaluation.gpu.plan import plan
from tuner.evaluation.gpu.report import figures, table
from tuner.evaluation.gpu.run import run_all
from tuner.evaluation.gpu.steps import BenchmarkStep, Done, run_step

BENCH: dict[str, Any] = {
    "provenance": {"device": "a device"},
    "dtype": "bfloat16",
    "runner": "static",
    "roofline": {"tokens_per_second": 300.0},
    "left_out": {},
    "contenders": {
        "plain": {
            "tokens_per_second": {"value": 200.0, "ci95": [190.0, 210.0]},
            "over_plain": {"value": 1.0, "ci95": [1.0, 1.0]},
            "share_of_roofline": 0.8,
            "identical": 15,
            "ties": 1,
            "texts": 16,
        }
    },
}


def test_every_step_is_a_command_with_flags_that_it_has(tmp_path: Path) -> None:
    for step in plan(tmp_path, "cuda", "llama-8b-like", 120):
        group, (name, *arguments) = main, step.arguments
        if name == "evaluate":
            group, (name, *arguments) = evaluate, arguments
        command = group.get_command(click.Context(group), name)
        assert command is not None, step.name
        command.make_context(name, arguments)  # raises for an unknown flag


def test_single_sequences_then_batches_are_benched_on_held_out_prompts(tmp_path: Path) -> None:
    steps = {step.name: step.arguments for step in plan(tmp_path, "cuda", "llama-8b-like", 120)}
    names = list(steps)
    first = names.index("bench")
    assert names[first + 1 : first + 3] == ["bench in batches of 4", "bench in batches of 16"]

    def flag(step: str, name: str) -> str:
        return steps[step][steps[step].index(name) + 1]

    for name, size in zip(names[first + 1 : first + 3], (4, 16), strict=True):
        assert flag(name, "--batch-size") == str(size)
        assert 2 * size <= int(flag(name, "--prompts")) <= int(flag("search", "--held-out-prompts"))
        check_names(flag(name, "--against").split(","), size)
    assert len({flag(name, "--out") for name in names[first : first + 3]}) == 3


def test_all_steps_together_have_their_time(tmp_path: Path) -> None:
    now = 0.0
    limits: list[float] = []

    def run(step: BenchmarkStep, out: Path) -> Done:
        nonlocal now
        limits.append(step.timeout)
        now += min(step.timeout, 70.0)
        return Done(step.name, True, 70.0, "")

    steps = [BenchmarkStep(name, ("a",), 90.0) for name in ("one", "two", "three", "four")]
    done = run_all(steps, tmp_path, run, seconds=150.0, clock=lambda: now)
    assert limits == [90.0, 80.0, 10.0]
    assert [each.ok for each in done] == [True, True, True, False]
    assert done[-1].last_line == "not run: the 150 s for all steps are up"
    assert json.loads((tmp_path / "gpu_benchmark.json").read_text())["steps"][-1]["ok"] is False


def test_a_step_that_fails_is_told_and_the_others_still_run(tmp_path: Path) -> None:
    steps = [BenchmarkStep("one", ("a",), 1), BenchmarkStep("two", ("b",), 1)]

    def run(step: BenchmarkStep, out: Path) -> Done:
        if step.name == "two":
            (out / "bfloat16").mkdir()
            (out / "bfloat16" / "bench.json").write_text(json.dumps(BENCH))
        return Done(step.name, step.name == "two", 2.0, "out of memory")

    done = run_all(steps, tmp_path, run)
    written = json.loads((tmp_path / "gpu_benchmark.json").read_text())
    assert [(each["name"], each["ok"]) for each in written["steps"]] == [("one", False), ("two", True)]
    assert written["figures"]["bfloat16"]["contenders"]["plain"]["identical"] == 15
    assert written["figures"]["bfloat16"]["batch_size"] == 1
    shown = io.StringIO()
    Console(file=shown, width=140).print(table(done, figures(tmp_path)))
    assert "FAILED: one" in shown.getvalue()
    assert "out of memory" in shown.getvalue()
    assert "15/16 + 1 ties" in shown.getvalue()


@pytest.mark.parametrize(
    ("code", "ok", "last_line"),
    [
        ("print(6 * 7)", True, "42"),
        ("raise ValueError('no such device')", False, "no such device"),
        ("import time; time.sleep(60)", False, "given up after 2 s"),
    ],
)
def test_a_step_is_run_in_a_process_of_its_own(tmp_path: Path, code: str, ok: bool, last_line: str) -> None:
    done = run_step(BenchmarkStep("a step", (code,), timeout=2), tmp_path, (sys.executable, "-c"))
    assert done.ok is ok
    assert last_line in done.last_line
    assert (tmp_path / "a_step.log").exists()


def test_figures_hold_the_readiness_of_candidates(tmp_path: Path) -> None:
    (tmp_path / "passes").mkdir()
    (tmp_path / "passes" / "passes.json").write_text(json.dumps({"readiness": {"candidates": []}}))
    assert figures(tmp_path) == {"readiness": {"candidates": []}}
