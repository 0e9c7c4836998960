"""What exit heads learn from: never a held-out prompt, and no tuning prompt while there are enough others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from decoding.exit_heads import head_name, prompt_sha256, read_facts
from decoding.target import Target
from tests.support.heads import training, write_heads
from tests.support.tiny import tiny_target, write_tiny_prompts
from tuner.config import SearchConfig
from tuner.heads.distill import FEWEST_SPARE, of_search
from tuner.heads.found import FoundHead, num_trained_on
from tuner.inputs.models import Loaded
from tuner.inputs.prompts import PromptSet, load_prompts


class Said:
    """A watcher that remembers what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture
def loaded(target: Target, checkpoint: Path) -> Loaded:
    return Loaded(target.model, AutoTokenizer.from_pretrained(checkpoint), str(checkpoint), None)


def drawn(path: Path, loaded: Loaded, num_spare: int) -> PromptSet:
    return load_prompts(
        str(path),
        loaded.tokenizer,
        num_tuning=4,
        num_held_out=4,
        num_spare=num_spare,
        max_new_tokens=8,
        context_length=256,
        seed=0,
    )


def learnt(
    target: Target, loaded: Loaded, drawn_prompts: PromptSet, said: Said, **distillation: Any
) -> set[tuple[int, ...]]:
    config = SearchConfig(model="m", dataset="d", distillation=distillation)
    work = of_search(config, loaded, target, drawn_prompts, said)  # type: ignore[arg-type]
    return {prompt.token_ids for prompt in work.lessons}


def ids(*parts: tuple[Any, ...]) -> set[tuple[int, ...]]:
    return {prompt.token_ids for part in parts for prompt in part}


def test_enough_spare_prompts_are_learnt_from_alone(target: Target, loaded: Loaded, tmp_path: Path) -> None:
    said = Said()
    prompts = drawn(write_tiny_prompts(tmp_path / "p.jsonl", 60), loaded, 100)
    assert len(prompts.spare) >= FEWEST_SPARE
    assert learnt(target, loaded, prompts, said) == ids(prompts.spare)
    assert len(learnt(target, loaded, prompts, said, prompts=10)) == 10
    assert said.lines == []


def test_for_want_of_others_tuning_prompts_are_learnt_from_and_it_is_said(
    target: Target, loaded: Loaded, tmp_path: Path
) -> None:
    said = Said()
    prompts = drawn(write_tiny_prompts(tmp_path / "p.jsonl", 20), loaded, 100)
    assert 0 < len(prompts.spare) < FEWEST_SPARE
    assert learnt(target, loaded, prompts, said) == ids(prompts.spare, prompts.tuning)
    assert len(said.lines) == 1
    assert "trials will flatter them" in said.lines[0]


def test_lessons_of_another_dataset_leave_out_the_prompts_of_the_search(
    target: Target, loaded: Loaded, tmp_path: Path
) -> None:
    said = Said()
    path = write_tiny_prompts(tmp_path / "p.jsonl", 40)
    prompts = drawn(path, loaded, 0)
    of_all = learnt(target, loaded, prompts, said, training_dataset=str(path))
    assert len(of_all) == 32, "those of both parts are left out"
    assert not of_all & ids(prompts.tuning, prompts.held_out)
    assert len(learnt(target, loaded, prompts, said, training_dataset=str(path), prompts=8)) <= 8
    assert said.lines == []


def test_prompts_that_heads_have_learnt_from_are_counted_once(target: Target, loaded: Loaded, tmp_path: Path) -> None:
    prompts = drawn(write_tiny_prompts(tmp_path / "p.jsonl", 20), loaded, 0)
    lessons = tuple(prompt_sha256(prompt.token_ids) for prompt in prompts.tuning[:3])
    facts = training(prompts_sha256=lessons)
    drafts = write_heads(target, tmp_path / "heads", [2, 3], training=facts)
    heads = [FoundHead(draft, read_facts(tmp_path / "heads" / head_name(layer))) for layer, draft in drafts.items()]
    assert num_trained_on(heads, prompts.tuning) == 3
    assert num_trained_on(heads, prompts.held_out) == 0
    assert num_trained_on([], prompts.tuning) == 0
