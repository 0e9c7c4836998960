"""The further kinds of prompts: the same for the same seed, all distinct, and as many as asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from click.testing import CliRunner

from tuner.cli.main import main
from tuner.evaluation.models.demo_kinds import LENGTH, NUM_ROWS, asserts, fills, prose, tables


@pytest.mark.parametrize("kind", [prose, tables, asserts, fills])
def test_prompts_are_distinct_and_decided_by_the_seed(kind: Callable[[int, int], list[str]]) -> None:
    prompts = kind(12, 0)
    assert len(set(prompts)) == 12
    assert prompts == kind(12, 0) != kind(12, 1)


def test_prose_is_cut_between_words_and_tables_are_whole_rows() -> None:
    for prompt in prose(8, 0):
        assert LENGTH / 2 < len(prompt) <= LENGTH
        assert any(f" {prompt} " in text for text in topics.values())
    for table in tables(8, 0):
        rows = table.splitlines()
        assert len(rows) == NUM_ROWS
        assert len({row.count(",") for row in rows}) == 1
        assert all(row.startswith("(") and row.endswith("),") for row in rows)


def test_fills_repeat_one_row() -> None:
    for array in fills(8, 0):
        name, *rows = array.splitlines()
        assert name.endswith(" = [")
        assert len(rows) == NUM_ROWS // 2
        assert len(set(rows)) == 1
        assert len(set(rows[0].replace(" ", "").strip(",").split(","))) == 1


def test_files_are_written_and_too_many_are_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["evaluate", "demo-kinds", "--out", str(tmp_path), "--num-prompts", "5"])
    assert done.exit_code == 0, done.output
    for kind in ("prose", "tables", "asserts", "fills"):
        lines = (tmp_path / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
        assert len({json.loads(line)["prompt"] for line in lines}) == 5
    refused = CliRunner().invoke(main, ["evaluate", "demo-kinds", "--out", str(tmp_path), "--num-prompts", "5000"])
    assert refused.exit_code == 2
    assert "fewer than 5000" in refused.output
