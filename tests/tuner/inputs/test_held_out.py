"""Held-out prompts of a search, found again from its profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from decoding.exit_heads import prompt_sha256
from decoding.profile import DatasetFacts
from tests.support.paths import ROOT
from tuner.fields import PromptSettings
from tuner.inputs.held_out import find_prompts
from tuner.inputs.prompts import PromptSet, load_prompts

DEMO = ROOT / "configs/demo"
LIMITS: dict[str, Any] = {"max_new_tokens": 48, "context_length": 512}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO / "model")


@pytest.fixture(scope="module")
def searched(tokenizer: Any) -> PromptSet:
    """The prompts of the demo's search, by its own columns."""
    columns = PromptSettings(prompt_column="prompt", group_column="file")
    return load_prompts(
        str(DEMO / "prompts.jsonl"), tokenizer, num_tuning=22, num_held_out=24, seed=0, settings=columns, **LIMITS
    )


def facts_of(searched: PromptSet, **changed: Any) -> DatasetFacts:
    hashes = tuple(prompt_sha256(prompt.token_ids) for prompt in searched.held_out)
    facts = {
        "name": str(DEMO / "prompts.jsonl"),
        "fingerprint": searched.fingerprint,
        "tuning_prompts": 22,
        "held_out_prompts": 24,
        "max_new_tokens": 48,
        "seed": 0,
        "held_out_sha256": hashes,
    }
    return DatasetFacts.model_validate(facts | changed)


def find(
    tokenizer: Any, facts: DatasetFacts | None, source: Path | None = None, **changed: Any
) -> tuple[PromptSet, str]:
    settings = {"num_tuning": None, "num_held_out": None, "seed": 0, **LIMITS, **changed}
    columns = settings.pop("columns", PromptSettings())
    return find_prompts(str(source or DEMO / "prompts.jsonl"), tokenizer, facts, columns, **settings)


@pytest.mark.parametrize(
    "changed",
    [
        {"columns": PromptSettings(group_column="file")},  # README's
        {"seed": 7, "num_tuning": 3},
    ],
)
def test_the_prompts_held_out_are_found_whatever_is_said_of_the_split(
    tokenizer: Any, searched: PromptSet, changed: dict[str, Any]
) -> None:
    found, origin = find(tokenizer, facts_of(searched), **changed)
    assert origin == "held out by the search that made the profile"
    assert [prompt.token_ids for prompt in found.held_out] == [each.token_ids for each in searched.held_out]
    others = {prompt.token_ids for prompt in found.tuning}
    assert found.tuning
    assert others.isdisjoint(prompt.token_ids for prompt in searched.held_out)


def test_fewer_are_the_first_of_them(tokenizer: Any, searched: PromptSet) -> None:
    found, _ = find(tokenizer, facts_of(searched), num_held_out=20)
    assert [prompt.row for prompt in found.held_out] == [prompt.row for prompt in searched.held_out[:20]]


@pytest.mark.parametrize(
    "changed",
    [
        {"num_held_out": 30},
        {"columns": PromptSettings(template="# {prompt}")},
    ],
)
def test_prompts_that_are_not_those_of_the_search_are_not_called_held_out(
    tokenizer: Any, searched: PromptSet, changed: dict[str, Any]
) -> None:
    _, origin = find(tokenizer, facts_of(searched), **changed)
    assert "held out" not in origin
    assert "it may have been tuned on some of these" in origin


def test_the_rest_of_a_dataset_that_has_lost_rows_is_held_out_and_counted(
    tokenizer: Any, searched: PromptSet, tmp_path: Path
) -> None:
    rows = (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    gone = {prompt.row for prompt in searched.held_out[:3]}
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(row for index, row in enumerate(rows) if index not in gone), encoding="utf-8")
    found, origin = find(tokenizer, facts_of(searched), fewer)
    assert [each.token_ids for each in found.held_out] == [each.token_ids for each in searched.held_out[3:]]
    assert origin == "held out by the search that made the profile (21 of 24: the dataset does not have the others)"


def test_a_profile_of_an_earlier_version_is_split_again_and_recognised_by_the_fingerprint(
    tokenizer: Any, searched: PromptSet
) -> None:
    earlier = facts_of(searched, seed=None, held_out_sha256=())
    columns = PromptSettings(group_column="file")
    same, origin = find(tokenizer, earlier, columns=columns)
    assert origin.startswith("held out")
    assert [prompt.row for prompt in same.held_out] == [prompt.row for prompt in searched.held_out]
    _, origin = find(tokenizer, earlier.model_copy(update={"held_out_prompts": 20}), columns=columns)
    assert origin.startswith("not the prompts")
    assert "does not record its prompts" in find(tokenizer, None)[1]
