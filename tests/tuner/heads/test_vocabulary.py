"""The tokens that exit heads draft from, and heads that learn on them alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from decoding.errors import DistillationError
from decoding.target import DraftVocabulary, Target
from decoding.target.heads import new_exit_head
from tests.support.tiny import tiny_llama, tiny_target
from tuner.config import DistillSettings
from tuner.heads import vocabulary as vocabularies
from tuner.heads.texts import GeneratedText, TextPlan, generate_batch
from tuner.heads.training import Run, Student, evaluate, least_loss, of_vocabulary, soft_label_loss, train
from tuner.heads.vocabulary import choose_vocabulary, draft_vocabulary_size

TEXTS = [GeneratedText((5, 5, 9), (9, 9, 7, 2)), GeneratedText((5,), (9, 11, 2))]


def settings(size: int | None = None) -> DistillSettings:
    return DistillSettings(draft_vocabulary=size, steps=40, batch_size=6, learning_rate=1e-2)


def test_most_frequent_tokens_are_chosen_and_ties_go_to_lower_ids() -> None:
    # Occurrences: 9 four times, 5 three times, 2 twice, 7 and 11 once.
    chosen = choose_vocabulary(tiny_target(), TEXTS, settings(5))
    assert chosen == DraftVocabulary((2, 5, 7, 9, 11))
    chosen = choose_vocabulary(tiny_target(), TEXTS, settings(7))
    assert chosen == DraftVocabulary((0, 1, 2, 5, 7, 9, 11))


def test_end_tokens_are_chosen_even_if_no_text_ends() -> None:
    model = tiny_llama()
    model.generation_config.eos_token_id = [60, 61]
    chosen = choose_vocabulary(Target(model), TEXTS, settings(5))
    assert chosen is not None
    assert {60, 61} <= set(chosen.token_ids)


def test_small_vocabularies_stay_whole_and_large_ones_are_quartered(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    rows = target.lm_heads.num_rows
    assert rows is not None
    assert draft_vocabulary_size(target, settings()) is None
    assert draft_vocabulary_size(target, settings(rows)) is None, "all tokens"
    monkeypatch.setattr(vocabularies, "LARGE", rows)
    assert draft_vocabulary_size(target, settings()) == rows // 4


def test_model_without_a_plain_lm_head_drafts_from_all_tokens() -> None:
    model = tiny_llama()
    model.lm_head = nn.Sequential(model.lm_head)
    target = Target(model)
    assert choose_vocabulary(target, TEXTS, settings()) is None
    with pytest.raises(DistillationError, match="leave out draft_vocabulary"):
        draft_vocabulary_size(target, settings(8))


def test_least_loss_is_reached_by_a_draft_proportional_to_the_labels() -> None:
    labels = torch.softmax(torch.randn(5, 12, generator=torch.Generator().manual_seed(0)), dim=-1)
    for vocabulary in (None, DraftVocabulary((0, 3, 4, 11))):
        chosen = of_vocabulary(labels, vocabulary)
        least = least_loss(chosen)
        assert float(soft_label_loss(chosen.log(), chosen)) == pytest.approx(least, abs=1e-5)
        assert float(soft_label_loss(torch.zeros_like(chosen), chosen)) > least


def test_head_learns_on_its_own_tokens() -> None:
    target = tiny_target()
    prompts = tuple(tuple((3 * seed + index) % 64 for index in range(4)) for seed in range(12))
    plan = TextPlan(prompts=prompts, samples=2, temperature=1.0, response_tokens=12, batch_size=6, seed=0)
    texts = [text for number, batch in enumerate(plan.batches) for text in generate_batch(target, batch, plan, number)]
    vocabulary = choose_vocabulary(target, texts, settings(24))
    run = Run({2: Student(new_exit_head(target, vocabulary))})
    before = evaluate(target, {2: new_exit_head(target, vocabulary)}, texts, 6)[2]
    train(run, target, texts, settings(24), seed=0)
    after = evaluate(target, {2: run.students[2].stored_head()}, texts, 6)[2]
    assert run.losses[-1][2] < run.losses[0][2]
    assert after.agreement > before.agreement + 0.02
