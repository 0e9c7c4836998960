"""The exit heads of a suite: made once for all tasks, and never trained on what any of them holds out."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoding.errors import ExitHeadError
from decoding.exit_heads import prompt_sha256
from decoding.head_folder import list_heads
from tests.support.tiny import write_tiny_prompts
from tuner.evaluation.suite.contract import Place
from tuner.evaluation.suite.document import Suite
from tuner.evaluation.suite.heads_cell import HeadsCell
from tuner.inputs.models import load
from tuner.inputs.prompts import search_prompts
from tuner.progress import Unwatched


@pytest.fixture
def cell(workplace: Path, checkpoint: Path) -> HeadsCell:
    """Two tasks on the same rows with different seeds: what one holds out, the other has among its other rows."""
    out = workplace / "suite"
    out.mkdir()
    (workplace.parent / "mlflow.db").rename(out / "mlflow.db")
    rows = str(write_tiny_prompts(workplace / "rows.jsonl", 60))
    suite = {
        "models": {"tiny": {"model": str(checkpoint)}},
        "tasks": {"a": {"dataset": rows, "seed": 1}, "b": {"dataset": rows, "seed": 2}},
        "methods": {"exit_layer": {"studies": {"exit_layer": {"exit_layers": "2"}}}},
        "search": {
            "tuning_prompts": 4,
            "held_out_prompts": 6,
            "prompts_per_trial": 2,
            "max_new_tokens": 12,
            "distillation": {"samples": 1, "response_tokens": 16, "steps": 2},
        },
    }
    return HeadsCell(Place(Suite.model_validate(suite), out), "tiny")


def held_out(cell: HeadsCell) -> set[tuple[int, ...]]:
    loaded = load(cell.config().model)
    parts = [search_prompts(task, loaded.tokenizer, 256) for task in cell.task_configs()]
    return {prompt.token_ids for part in parts for prompt in part.held_out}


def test_no_head_is_trained_on_a_held_out_prompt_of_any_task(cell: HeadsCell) -> None:
    result = cell.run(Unwatched())
    assert result["exits"] == [2]
    facts = list_heads(cell.config().heads)[2]
    assert facts.training is not None
    trained_on = set(facts.training.prompts_sha256)
    assert len(trained_on) >= 32
    assert trained_on.isdisjoint(prompt_sha256(prompt) for prompt in held_out(cell))


def test_heads_of_the_folder_are_used_unless_they_saw_held_out_prompts(
    cell: HeadsCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell.run(Unwatched())
    monkeypatch.setattr("tuner.heads.distill.distil_and_track", None)  # nothing is trained again
    assert cell.run(Unwatched())["exits"] == [2]
    tasks = {**cell.place.suite.tasks, "c": {**cell.place.suite.tasks["a"], "seed": 3}}
    further = HeadsCell(Place(cell.place.suite.model_copy(update={"tasks": tasks}), cell.place.out), "tiny")
    with pytest.raises(ExitHeadError, match="was trained on"):
        further.run(Unwatched())
