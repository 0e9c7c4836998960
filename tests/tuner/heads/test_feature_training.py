"""A feature head learns to follow the model over several of its own steps."""

from __future__ import annotations

import pytest
import torch

from decoding.errors import DistillationError
from decoding.target import Target
from tests.support.families import build, some_tokens
from tests.support.tiny import tiny_target
from tuner.config import DistillSettings
from tuner.heads.kinds import HEAD_KINDS
from tuner.heads.limits import bytes_per_head, shared_bytes
from tuner.heads.texts import GeneratedText, TextPlan, generate_batch
from tuner.heads.training import Run, Student, evaluate, train
from tuner.inputs.memory import ModelSize

SETTINGS = DistillSettings(head="feature", unrolled_steps=2, steps=40, batch_size=6, learning_rate=1e-2)
KIND = HEAD_KINDS["feature"]


def generated_by(target: Target, seed: int = 0) -> list[GeneratedText]:
    prompts = tuple(tuple(token % 64 for token in some_tokens(3 + index % 6, seed=index)) for index in range(12))
    plan = TextPlan(prompts, samples=2, temperature=1.0, response_tokens=12, batch_size=5, seed=seed)
    return [text for number, batch in enumerate(plan.batches) for text in generate_batch(target, batch, plan, number)]


def test_each_step_drafts_better_after_the_training_and_the_model_stays() -> None:
    target = tiny_target(4)
    texts, unseen = generated_by(target), generated_by(target, seed=1)
    model = [weight.clone() for weight in target.model.parameters()]
    student = Student(KIND.new_head(target, None))
    before = evaluate(KIND, target, {4: student.stored_head()}, unseen, 6)[4]
    run = Run({4: student})
    train(run, target, texts, SETTINGS, seed=0)
    after = evaluate(KIND, target, {4: student.stored_head()}, unseen, 6)[4]
    assert len(run.losses) == 40
    assert all(now.acceptance > then.acceptance + 0.03 for then, now in zip(before[:2], after[:2], strict=True))
    assert all(now.agreement > then.agreement + 0.03 for then, now in zip(before[:2], after[:2], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(model, target.model.parameters(), strict=True))


def test_a_model_without_masks_of_ours_is_refused() -> None:
    settings = DistillSettings(head="feature")
    with pytest.raises(DistillationError, match="no feature head can be trained for this model"):
        KIND.layers(settings, Target(build("bloom")))
    with pytest.raises(DistillationError, match="leave out exit_layers 2"):
        KIND.layers(settings.model_copy(update={"exit_layers": (2,)}), tiny_target(3))


def test_memory_counts_the_joining_layer_and_every_unrolled_step() -> None:
    size = ModelSize.of(tiny_target(3).model)
    exits, feature = DistillSettings(), DistillSettings(head="feature", unrolled_steps=1)
    joining = 2 * size.hidden_size**2 + 2 * size.hidden_size
    assert bytes_per_head(size, 9, feature) - bytes_per_head(size, 9, exits) == joining * (4 + 8)
    more = feature.model_copy(update={"unrolled_steps": 3})
    logits = 3 * 4 + 2 * 4  # logits with their softmax and gradient
    per_step = feature.batch_size * feature.response_tokens * size.vocabulary * logits
    assert shared_bytes(size, 9, more) - shared_bytes(size, 9, feature) > 2 * per_step
