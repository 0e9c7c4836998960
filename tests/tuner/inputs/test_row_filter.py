"""Rows chosen by the value of a column, in the name of the data set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tuner.errors import DatasetError
from tuner.inputs.datasets import open_table

ROWS = [{"prompt": f"question {index}", "task": task} for index, task in enumerate(["math", "qa", "math", "rag"])]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
    return path


@pytest.mark.parametrize(("values", "expected"), [("math", [0, 2]), ("rag|qa", [1, 3])])
def test_only_rows_with_the_value_are_read(questions: Path, values: str, expected: list[int]) -> None:
    table = open_table(f"{questions}#task={values}")
    assert table.values("prompt") == [ROWS[index]["prompt"] for index in expected]
    assert table.name == f"{questions}#task={values}"


def test_a_file_may_have_such_a_name(questions: Path) -> None:
    odd = questions.with_name("a#task=math.jsonl")
    odd.write_bytes(questions.read_bytes())
    assert open_table(str(odd)).num_rows == len(ROWS)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("#kind=math", "no column 'kind' to choose rows by; valid: prompt, task"),
        ("#task=maths", "has 'maths' in its column 'task'; values: 'math', 'qa', 'rag'"),
    ],
)
def test_a_wrong_filter_names_what_is_there(questions: Path, end: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        open_table(f"{questions}{end}")
