"""A feature head for the widened model, trained for a few seconds: none is committed.

It is trained on the demo model, by the targets of a distillation, on the prompts from other source files that the committed exit
heads were distilled on. Those texts are read as they are: the model continues none, which would take longer than the training.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial

from decoding.drafts import FeatureHeadDraft
from decoding.target import Target
from tuner.config import DistillSettings
from tuner.evaluation.gpu.shared import DEMO, Shared
from tuner.evaluation.models.widen import widen_feature_head
from tuner.heads.feature_training import train_unrolled
from tuner.heads.texts import GeneratedText
from tuner.heads.training import Run, Student, train
from tuner.inputs.prompts import load_prompts
from tuner.prompt_settings import PromptSettings

TEXTS = DEMO / "distill_prompts.jsonl"
NUM_TEXTS, NUM_READ = 256, 16
"""Texts to learn from, and their first tokens, which are not learned."""
STEPS, BATCH_SIZE, UNROLLED = 400, 8, 3


@dataclass(frozen=True)
class TrainedHead:
    """The draft of a head, and how long it was trained."""

    draft: FeatureHeadDraft
    steps: int
    seconds: float


def train_feature_head(
    shared: Shared, seconds: float, *, num_texts: int = NUM_TEXTS, steps: int = STEPS
) -> TrainedHead:
    """Train a feature head of the demo model for at most `seconds` and write it, widened, beside the widened exit heads."""
    narrow = Target(copy.deepcopy(shared.source).to(shared.device))
    layer = narrow.num_layers
    run = Run({layer: Student(narrow.new_feature_head())}, most_seconds=seconds)
    settings = DistillSettings(steps=STEPS, batch_size=BATCH_SIZE)
    train(run, narrow, _texts(shared), settings, 0, step=partial(train_unrolled, num_steps=UNROLLED))
    widen_feature_head(run.students[layer].stored_head(), narrow, shared.eager, shared.heads_folder)
    draft = shared.heads.feature_draft()
    assert draft is not None, "it was written just now"
    return TrainedHead(draft, run.step, run.seconds)


def _texts(shared: Shared) -> list[GeneratedText]:
    found = load_prompts(
        str(TEXTS),
        shared.tokenizer,
        num_tuning=NUM_TEXTS,
        num_held_out=1,
        max_new_tokens=1,
        context_length=shared.source.config.max_position_embeddings,
        seed=0,
        settings=PromptSettings(),
    )
    texts = [prompt.token_ids for prompt in found.tuning]
    return [GeneratedText(each[:NUM_READ], each[NUM_READ:]) for each in texts if len(each) > NUM_READ]
