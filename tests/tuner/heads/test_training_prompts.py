"""Training prompts of exit heads: never a held-out prompt, and tuning prompts only if there are too few others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from decoding.exit_heads import prompt_sha256
from decoding.head_folder import HeadFolder
from decoding.target import Target
from tests.support.heads import training, write_heads
from tests.support.tiny import tiny_target, write_tiny_prompts
from tuner.config import SearchConfig
from tuner.heads.plan import MIN_SPARE_PROMPTS, of_search
from tuner.inputs.models import Loaded
from tuner.inputs.prompts import PromptSet, load_prompts
from tuner.progress import Progress
from tuner.search.task import token_ids


class RecordedLines(Progress):
    """Progress that records its lines."""

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


def trained_on(
    target: Target, loaded: Loaded, drawn_prompts: PromptSet, progress: RecordedLines, **distillation: Any
) -> set[tuple[int, ...]]:
    config = SearchConfig(model="m", dataset="d", distillation=distillation)
    work = of_search(config, loaded, target, drawn_prompts, progress)
    return {prompt.token_ids for prompt in work.training_prompts}


def ids(*parts: tuple[Any, ...]) -> set[tuple[int, ...]]:
    return {prompt.token_ids for part in parts for prompt in part}


def test_only_spare_prompts_if_there_are_enough(target: Target, loaded: Loaded, tmp_path: Path) -> None:
    progress = RecordedLines()
    prompts = drawn(write_tiny_prompts(tmp_path / "p.jsonl", 60), loaded, 100)
    assert len(prompts.spare) >= MIN_SPARE_PROMPTS
    assert trained_on(target, loaded, prompts, progress) == ids(prompts.spare)
    assert len(trained_on(target, loaded, prompts, progress, prompts=10)) == 10
    assert progress.lines == []


def test_tuning_prompts_too_if_there_are_few_spare_ones_with_a_warning(
    target: Target, loaded: Loaded, tmp_path: Path
) -> None:
    progress = RecordedLines()
    prompts = drawn(write_tiny_prompts(tmp_path / "p.jsonl", 20), loaded, 100)
    assert 0 < len(prompts.spare) < MIN_SPARE_PROMPTS
    assert trained_on(target, loaded, prompts, progress) == ids(prompts.spare, prompts.tuning)
    assert len(progress.lines) == 1
    assert "trials will overrate them" in progress.lines[0]


def test_prompts_of_the_search_are_left_out_of_a_training_dataset(
    target: Target, loaded: Loaded, tmp_path: Path
) -> None:
    progress = RecordedLines()
    path = write_tiny_prompts(tmp_path / "p.jsonl", 40)
    prompts = drawn(path, loaded, 0)
    of_all = trained_on(target, loaded, prompts, progress, training_dataset=str(path))
    assert len(of_all) == 32, "prompts of both parts are left out"
    assert not of_all & ids(prompts.tuning, prompts.held_out)
    assert len(trained_on(target, loaded, prompts, progress, training_dataset=str(path), prompts=8)) <= 8
    assert progress.lines == []


@pytest.mark.parametrize(
    ("column", "expected"), [(None, {"w7 w1 w8", "w7 w2 w8"}), ("other", {"w3", "w4"})], ids=["template", "column"]
)
def test_training_prompts_have_the_template_of_the_search(
    column: str | None, expected: set[str], target: Target, loaded: Loaded, tmp_path: Path
) -> None:
    prompts = drawn(write_tiny_prompts(tmp_path / "p.jsonl", 20), loaded, 0)
    path = tmp_path / "training.jsonl"
    path.write_text('{"q": "w1", "other": "w3"}\n{"q": "w2", "other": "w4"}\n')
    named = {"training_dataset": str(path), "training_column": column}
    config = SearchConfig(model="m", dataset="d", template="w7 {q} w8", distillation=named)
    work = of_search(config, loaded, target, prompts, RecordedLines())
    assert {prompt.text for prompt in work.training_prompts} == expected


def test_prompts_that_several_heads_trained_on_count_once(target: Target, loaded: Loaded, tmp_path: Path) -> None:
    prompts = drawn(write_tiny_prompts(tmp_path / "p.jsonl", 20), loaded, 0)
    hashes = tuple(prompt_sha256(prompt.token_ids) for prompt in prompts.tuning[:3])
    facts = training(prompts_sha256=hashes)
    write_heads(target, tmp_path / "heads", [2, 3], training=facts)
    folder = HeadFolder(target, tmp_path / "heads")
    tuning, held_out = (token_ids(part) for part in (prompts.tuning, prompts.held_out))
    assert folder.num_trained_on([2, 3, 4], tuning) == 3
    assert folder.num_trained_on([2, 3, 4], held_out) == 0
    assert folder.num_trained_on([], tuning) == 0


def test_long_prompts_are_cut_from_the_left_and_recognised_whole(
    target: Target, loaded: Loaded, tmp_path: Path
) -> None:
    prompts = drawn(write_tiny_prompts(tmp_path / "p.jsonl", 60), loaded, 100)
    longest = max(len(token_ids) for token_ids in ids(prompts.spare))
    config = SearchConfig(model="m", dataset="d", distillation={"prompt_tokens": longest - 1})  # type: ignore[arg-type]
    work = of_search(config, loaded, target, prompts, RecordedLines())
    assert max(map(len, work.training_texts.prompts)) == longest - 1
    whole = [prompt.token_ids for prompt in work.training_prompts]
    assert max(map(len, whole)) == longest
    assert all(prompt[-len(cut) :] == cut for prompt, cut in zip(whole, work.training_texts.prompts, strict=True))


def test_exits_are_evaluated_on_some_held_out_prompts_from_first_to_last(
    target: Target, loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = drawn(write_tiny_prompts(tmp_path / "p.jsonl", 60), loaded, 100)
    config = SearchConfig(model="m", dataset="d")
    held_out = [prompt.token_ids for prompt in prompts.held_out]
    assert list(of_search(config, loaded, target, prompts, RecordedLines()).evaluation_texts.prompts) == held_out
    monkeypatch.setattr("tuner.heads.plan.MOST_EVALUATED", 2)
    work = of_search(config, loaded, target, prompts, RecordedLines())
    assert list(work.evaluation_texts.prompts) == [held_out[0], held_out[2]]
