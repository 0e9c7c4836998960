"""The training of one group of heads: together, in one pass of the target over each batch, and then evaluated.

Runs in the process of the distillation or in that of another device. A head is the same in any group, unless a time limit ends its
training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from decoding.target import Target
from tuner.config import DistillSettings
from tuner.heads.kinds import HEAD_KINDS, Figures, HeadKind, OnTexts
from tuner.heads.texts import GeneratedText
from tuner.heads.training import Losses, Run, Student, train
from tuner.heads.vocabulary import choose_vocabulary


@dataclass(frozen=True)
class GroupData:
    """What every group of one distillation is trained and evaluated on."""

    settings: DistillSettings
    seed: int
    texts: Sequence[GeneratedText]
    unseen: Sequence[GeneratedText]
    """Texts of held-out prompts."""

    @property
    def writing_seconds(self) -> float:
        return sum(text.seconds for text in (*self.texts, *self.unseen))

    @property
    def kind(self) -> HeadKind:
        return HEAD_KINDS[self.settings.head]

    def new_heads(self, target: Target, exits: Sequence[int]) -> dict[int, Any]:
        vocabulary = choose_vocabulary(target, self.texts, self.settings)
        return {exit_layer: self.kind.new_head(target, vocabulary) for exit_layer in exits}

    def new_run(self, target: Target, exits: Sequence[int], most_seconds: float | None) -> Run:
        run = Run({exit_layer: Student(head) for exit_layer, head in self.new_heads(target, exits).items()})
        run.most_seconds = most_seconds
        return run

    def train(self, run: Run, target: Target, on_step: Callable[[], None] = lambda: None) -> None:
        """Train to the end or for the seconds of the run. Raises `DistillationError` if a loss is not finite."""
        train(run, target, self.texts, self.settings, self.seed, on_step, self.kind.train_step(self.settings))

    def evaluate(
        self, target: Target, heads: Mapping[int, Any], on_texts: OnTexts = lambda num_texts: None
    ) -> dict[int, Figures]:
        return self.kind.evaluate(target, heads, self.unseen, self.settings.batch_size, on_texts)

    def finished(self, run: Run, target: Target, on_texts: OnTexts = lambda num_texts: None) -> TrainedGroup:
        """Return the heads of a run that has ended, as they are stored, and evaluate them. Their students are dropped."""
        heads = {exit_layer: student.stored_head() for exit_layer, student in run.students.items()}
        run.students.clear()  # the optimizers are not needed any more, and the evaluation takes memory too
        after = self.evaluate(target, heads, on_texts)
        stored = {layer: replace(head, block=head.block.to(torch.bfloat16)) for layer, head in heads.items()}
        return TrainedGroup(stored, after, run.losses, run.seconds)


@dataclass(frozen=True)
class TrainedGroup:
    heads: Mapping[int, Any]
    """In bfloat16, by exit layer."""
    after: Mapping[int, Figures]
    """Figures on the unseen texts, by exit layer."""
    losses: Sequence[Losses]
    """One entry per step."""
    seconds: float
    """Of training."""
