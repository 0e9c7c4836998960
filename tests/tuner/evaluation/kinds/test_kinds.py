"""The table of kinds, on a tiny model with made-up costs, and its arithmetic."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch._subclasses.fake_tensor import FakeTensorMode

from decoding.draft_length import Fixed
from decoding.drafts import KINDS, BitWidth, EarlyExit
from decoding.target import Target
from studies.contract import Candidate
from studies.measurement import Measurement
from tests.support.costs import made_up_costs
from tests.support.heads import training, write_heads
from tests.support.records import sample
from tests.support.refusals import refused
from tuner.cli.main import main
from tuner.evaluation.kinds.choosing import to_measure
from tuner.evaluation.kinds.document import KindRow
from tuner.evaluation.kinds.families import PROPOSALS
from tuner.evaluation.kinds.figures import PLAIN, additions, over, over_plain
from tuner.evaluation.kinds.footprint import _footprint, _tensor_bytes

Kinds = Callable[..., Result]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def kinds(here: Path, target: Target, checkpoint: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch) -> Kinds:
    """Return the evaluation with small sizes, a head, and made-up costs."""

    def costs(_: Target, *, max_tokens: int, bits: tuple[BitWidth, ...], **options: Any) -> Any:
        return made_up_costs(target, max_tokens, bits)

    monkeypatch.setattr("tuner.evaluation.kinds.run.cost_table", costs)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_heads(target, here / "heads", [2], training=training(seconds=30.0))
    rows = [json.loads(line) for line in prompts_file.read_text().splitlines()]
    questions = [{"prompt": row["prompt"], "task": "ab"[index % 2]} for index, row in enumerate(rows)]
    (here / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    sizes = {
        "model": checkpoint,
        "dataset": "questions.jsonl",
        "category-column": "task",
        "heads": "heads",
        "prompts": 2,
        "tuning": 1,
        "max-new-tokens": 12,
        "max-tokens": 3,
        "skip-sets": 8,
        "combinations": 1,
        "bits": 8,
        "out": "out",
    }

    def run(*switches: str, **flags: Any) -> Result:
        arguments = [part for key, value in {**sizes, **flags}.items() for part in (f"--{key}", str(value))]
        return CliRunner().invoke(main, ["evaluate", "kinds", *arguments, *switches])

    return run


def test_kinds_are_chosen_measured_and_compared(here: Path, kinds: Kinds) -> None:
    result = kinds()
    assert result.exit_code == 0, result.output
    found = json.loads((here / "out" / "kinds.json").read_text())
    rows = {row["name"]: row for row in found["kinds"]}
    alone = {"prompt lookup", "suffix automaton", "int8", "skip set", "exit", "exit with head"}
    assert alone < set(rows)
    combined = {name for name in rows if len(rows[name]["uses"]) > 1}
    assert combined
    assert rows["int8"]["footprint"]["memory_bytes"] > rows["exit with head"]["footprint"]["memory_bytes"] > 0
    assert rows["prompt lookup"]["footprint"]["memory_bytes"] == rows["exit"]["footprint"]["memory_bytes"] == 0
    assert rows["exit with head"]["distillation_seconds"] == 30.0
    assert rows["exit"]["distillation_seconds"] == 0.0
    assert rows["prompt lookup"]["draft_step"] < 0.01 < rows["int8"]["draft_step"] < 1
    for row in rows.values():
        samples = row["measurement"]["samples"]
        assert [each["prompt"] for each in samples] == list(range(len(samples)))
        assert all(each["identical"] for each in samples)
        assert row["predicted"] > 0
    assert {each["kind"] for each in found["additions"]} == {use for row in rows.values() for use in row["uses"]}
    assert str(here) not in json.dumps(found), "no machine paths"
    lines = list(csv.DictReader((here / "out" / "kinds.csv").read_text().splitlines()))
    tasks = {line["task"] for line in lines} - {"all"}
    assert len(tasks) > 1
    assert len(lines) == len(rows) * (1 + len(tasks))
    for words in ("What each kind adds", "Measured speed-up on each task", "predicted only", "plain decoding:"):
        assert words in result.stdout
    assert "…" not in result.stdout
    again = kinds()
    assert again.exit_code == 0
    assert json.loads((here / "out" / "kinds.json").read_text())["kinds"] == found["kinds"], "nothing is measured twice"


def test_only_some_kinds_on_a_further_task(here: Path, kinds: Kinds, prompts_file: Path) -> None:
    result = kinds("--only", "int8", "--only", "lookup", task=f"more={prompts_file}")
    assert result.exit_code == 0, result.output
    found = json.loads((here / "out" / "kinds.json").read_text())
    names = [row["name"] for row in found["kinds"]]
    assert names == ["int8", "prompt lookup", "suffix automaton", "lookup, int8"]
    assert "more" in found["kinds"][0]["predicted_by_task"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"only": "int7"}, ["unknown kind 'int7'", "int8"]),
        ({"task": "code"}, ["'code' is not NAME=DATASET"]),
        ({"category-column": "no"}, ["no column 'no'"]),
        ({"prompts": 500}, ["too few prompts"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_input_is_refused_in_one_line(here: Path, kinds: Kinds, flags: dict[str, Any], words: list[str]) -> None:
    refused(kinds(**flags), *words)
    assert not (here / "out").exists()


def test_fake_tensors_of_the_compiler_take_no_memory() -> None:
    with FakeTensorMode():
        fake = torch.empty(4)
    known = set(_tensor_bytes())
    kept = _footprint(lambda: (torch.empty(100), fake.clone(), torch.empty(7, device="meta")), known)
    assert kept.memory_bytes == 400


def test_every_kind_has_settings_to_choose_from() -> None:
    assert set(PROPOSALS) == {kind for kind, entry in KINDS.items() if entry.document.drafts}


def _row(name: str, uses: tuple[str, ...], speedups: list[float], predicted: float = 1.0) -> KindRow:
    samples = tuple(
        sample(1.0, index, draft_seconds=1.0 / speedup, category="ab"[index % 2])
        for index, speedup in enumerate(speedups)
    )
    return KindRow(
        name=name,
        uses=uses,
        candidate=Candidate(draft=EarlyExit(exit_layer=2), draft_length=Fixed()),
        predicted=predicted,
        predicted_by_task={},
        predicted_tokens_per_round=1.0,
        draft_step=0.5,
        choosing_seconds=0.0,
        distillation_seconds=0.0,
        measurement=Measurement(samples=samples),
    )


def test_a_kind_adds_what_the_best_with_it_gains_over_the_best_without_it() -> None:
    rows = [
        _row("lookup", ("lookup",), [1.0, 1.5, 1.0, 1.5]),
        _row("int8", ("int8",), [2.0, 2.0, 2.0, 2.0]),
        _row("lookup, int8", ("int8", "lookup"), [2.0, 3.0, 2.0, 3.0]),
        _row("exit", ("exit",), [0.5, 0.5, 0.5, 0.5]),
    ]
    found = {each.kind: each for each in additions(rows)}
    assert [(each.best_with, each.best_without) for each in found.values()] == [
        ("lookup, int8", "int8"),
        ("lookup, int8", "lookup"),
        ("exit", "lookup, int8"),
    ]
    assert found["lookup"].ratio.value == pytest.approx((1.0 * 1.5) ** 0.5)
    assert found["int8"].ratio.value == pytest.approx(2.0)
    assert found["exit"].ratio.value == pytest.approx((0.25 * 0.5 / 3.0) ** 0.5)
    assert found["int8"].ratio.ci95 == pytest.approx((2.0, 2.0)), "paired: the same on every prompt"


def test_the_best_without_a_kind_may_be_plain_decoding() -> None:
    (found, _) = additions([_row("int8", ("int8",), [2.0] * 4), _row("exit", ("exit",), [0.5] * 4)])
    assert (found.best_without, found.ratio.value) == (PLAIN, pytest.approx(2.0))


def test_ratios_are_over_the_same_prompts() -> None:
    row = _row("int8", ("int8",), [2.0, 4.0, 2.0, 4.0])
    assert over_plain(row.measurement).value == pytest.approx(8.0**0.5)
    with pytest.raises(ValueError, match="same prompts"):
        over(row.measurement, _row("exit", ("exit",), [2.0, 4.0]).measurement)


def test_the_best_combination_without_each_kind_is_measured() -> None:
    rows = [
        _row("exit", ("exit",), [1.0] * 2),
        _row("a", ("int8", "lookup"), [1.0] * 2, predicted=3.0),
        _row("b", ("exit", "lookup"), [1.0] * 2, predicted=2.0),
        _row("c", ("exit", "int8"), [1.0] * 2, predicted=1.5),
        _row("d", ("exit", "int8", "lookup"), [1.0] * 2, predicted=1.0),
    ]
    assert [row.name for row in to_measure(rows, 1)] == ["exit", "a", "b", "c"]
    assert [row.name for row in to_measure(rows, 0)] == ["exit"]
