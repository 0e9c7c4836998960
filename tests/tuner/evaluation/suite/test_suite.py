"""`sdtune evaluate suite` from end to end on a tiny model: tables, failures, and the same command again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from tests.support.refusals import refused
from tests.support.tiny import write_tiny_prompts
from tuner.cli.main import main

RunSuite = Callable[..., Result]
CELLS = ["tiny/float32/words/swift", "tiny/float32/words/bench", "tiny/float32/more/swift", "tiny/float32/more/bench"]


@pytest.fixture
def run_suite(workplace: Path, checkpoint: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch) -> RunSuite:
    """`sdtune evaluate suite` in this process on two tasks; the prompts of the second, `more.jsonl`, are not there yet."""
    monkeypatch.setattr("tuner.evaluation.gpu.roofline.BUFFER_BYTES", {"cpu": 2**16})
    out = workplace / "suite"
    out.mkdir()
    (workplace.parent / "mlflow.db").rename(out / "mlflow.db")
    document: dict[str, Any] = {
        "models": {"tiny": {"model": str(checkpoint)}},
        "tasks": {"words": {"dataset": str(prompts_file)}, "more": {"dataset": "more.jsonl"}},
        "methods": {"swift": {"studies": {"skip_sets": {"swift": {"max_candidates": 4}}}}},
        "baselines": ["plain-eager", "hf", "hf-prompt-lookup"],
        "search": {
            "tuning_prompts": 4,
            "held_out_prompts": 3,
            "prompts_per_trial": 2,
            "max_new_tokens": 24,
            "trials": 2,
            "finalists": 1,
        },
    }

    def run(*flags: str, **changes: Any) -> Result:
        Path("suite.yaml").write_text(yaml.safe_dump({**document, **changes}, sort_keys=False), encoding="utf-8")
        return CliRunner().invoke(main, ["evaluate", "suite", "--config", "suite.yaml", "--in-process", *flags])

    return run


def statuses(workplace: Path) -> dict[str, str]:
    cells = json.loads((workplace / "suite" / "suite.json").read_text())["cells"]
    return {name: record and record["status"] for name, record in cells.items()}


def test_a_suite_ends_with_what_it_can_measure_and_goes_on_where_it_failed(
    run_suite: RunSuite, workplace: Path
) -> None:
    first = run_suite()
    assert first.exit_code == 1, first.output  # the second task has no prompts
    assert list(statuses(workplace)) == CELLS
    assert list(statuses(workplace).values()) == ["ok", "ok", "failed", "failed"]
    assert "tiny/float32/more/swift failed: no such dataset 'more.jsonl'" in first.stdout
    contenders = json.loads((workplace / "suite/cells/tiny/float32/words/bench/record.json").read_text())["result"]
    assert set(contenders["measured"]) == {"plain", "hf", "hf-prompt-lookup", "swift"}
    assert all(sample["identical"] for contender in contenders["measured"].values() for sample in contender["samples"])

    write_tiny_prompts(workplace / "more.jsonl")
    second = run_suite()
    assert second.exit_code == 0, second.output
    assert list(statuses(workplace).values()) == ["ok"] * 4
    assert [line.split(": ")[1] for line in second.stderr.splitlines() if " cell " in line] == CELLS[2:]
    assert "overall" in second.stdout
    assert (workplace / "suite" / "suite.csv").read_text().count("\n") == 1 + 2 * 4


def test_one_search_serves_all_tasks_and_never_on_their_own_prompts(
    run_suite: RunSuite, workplace: Path, prompts_file: Path
) -> None:
    rows = prompts_file.read_text().splitlines()
    Path("tuning.jsonl").write_text("\n".join(rows[:8]) + "\n")
    Path("words.jsonl").write_text("\n".join(rows[6:]) + "\n")
    most = {"tuning": {"dataset": "tuning.jsonl", "tuning_prompts": 5}}
    every = {"words": {"dataset": "words.jsonl", "tuning_prompts": 2, "held_out_prompts": len(rows) - 8}}
    overlapping = run_suite(**most, tasks=every)
    assert overlapping.exit_code == 1, overlapping.output
    assert list(statuses(workplace).values()) == ["ok", "failed"]
    assert "2 of the 16 held-out prompts of words.jsonl are tuning prompts" in overlapping.stdout

    Path("words.jsonl").write_text("\n".join(rows[8:]) + "\n")
    apart = run_suite(**most, tasks={"words": {"dataset": "words.jsonl"}})
    assert apart.exit_code == 0, apart.output
    assert list(statuses(workplace)) == ["tiny/float32/tuning/swift", "tiny/float32/words/bench"]
    (figures,) = [
        line for line in json.loads((workplace / "suite/suite.json").read_text())["figures"] if line["trials"]
    ]
    assert (figures["task"], figures["method"], figures["tuned_on"]) == ("words", "swift", "tuning")
    assert "tuning: swift is skip" in apart.stdout


def test_a_dry_run_shows_the_cells_and_writes_nothing(run_suite: RunSuite, workplace: Path) -> None:
    shown = run_suite("--dry-run", "--only", "*/words/*")
    assert shown.exit_code == 0, shown.output
    assert [line.split()[0] for line in shown.stdout.splitlines() if line.strip().startswith("tiny/")] == CELLS[:2]
    assert "left: about" in shown.stdout
    assert [path.name for path in (workplace / "suite").iterdir()] == ["mlflow.db"]


def test_a_sitting_ends_before_a_cell_begins(run_suite: RunSuite, workplace: Path) -> None:
    ended = run_suite("--sitting", "0.000001s")
    assert ended.exit_code == 1, ended.output
    assert "the same command goes on" in ended.stderr
    assert set(statuses(workplace).values()) == {None}


def test_a_mistake_is_one_line(run_suite: RunSuite) -> None:
    refused(run_suite("--only", "*/nothing/*"), "--only */nothing/*: no cell has such an id")
    refused(run_suite(models={}), "suite.yaml: models")
