"""The groups of a distillation, and the files of their heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from decoding.documents.atomic_write import write_atomically
from decoding.errors import DistillationError
from decoding.exit_heads import HeadFacts, HeadTraining, prompt_sha256, save_head
from tuner.heads.group import GroupData, TrainedGroup
from tuner.heads.here import TrainerHere
from tuner.heads.kinds import Figures
from tuner.heads.report import loss_curve_csv
from tuner.heads.texts import GeneratedText
from tuner.heads.time_limit import TimeLimit
from tuner.heads.training import Losses
from tuner.inputs.environment import device_name, versions

if TYPE_CHECKING:
    from tuner.heads.distill import Distillation

CURVE = "training_curve.csv"


class HeadFiles:
    """The heads of one distillation: trained in groups, and written as soon as their group has ended."""

    def __init__(
        self, work: Distillation, data: GroupData, exits: Sequence[int], before: Mapping[int, Figures]
    ) -> None:
        self.facts: dict[int, HeadFacts] = {}
        self.losses: list[Losses] = []
        self.training_seconds = 0.0
        self._work, self._data, self._exits, self._before = work, data, exits, before
        self._num_begun = 0

    def run(
        self,
        groups: Sequence[tuple[int, ...]],
        trainer: TrainerHere,
        limit: TimeLimit,
        evaluation_seconds: float,
    ) -> None:
        """Train these groups, and write each head as soon as its group has ended."""
        for group in groups:
            seconds = limit.for_group(len(group), len(self._exits) - self._num_begun, evaluation_seconds)
            self._num_begun += len(group)
            self._write(trainer.train(group, seconds))

    def _write(self, trained: TrainedGroup) -> None:
        work = self._work
        cost = self._data.writing_seconds * len(trained.heads) / len(self._exits) + trained.seconds
        for exit_layer, head in trained.heads.items():
            figures = self._before[exit_layer], trained.after[exit_layer]
            self.facts[exit_layer] = _facts(work, exit_layer, self._data.texts, len(trained.losses), cost, *figures)
            save_head(work.path(exit_layer), head, self.facts[exit_layer])
        joined = _joined(self.losses, trained.losses)
        self.losses = [{layer: each[layer] for layer in self._exits if layer in each} for each in joined]
        self.training_seconds += trained.seconds
        curve = loss_curve_csv(self.losses).encode()
        write_atomically(work.folder / CURVE, curve, what="the training curve", error=DistillationError)
        work.checkpoint.unlink(missing_ok=True)


def _joined(losses: Sequence[Losses], more: Sequence[Losses]) -> list[Losses]:
    """Return the losses of two groups by step; a time limit may have ended one of them earlier, which ends both."""
    return [{**of_step, **others} for of_step, others in zip(losses, more, strict=False)] if losses else list(more)


def _facts(
    work: Distillation,
    exit_layer: int,
    texts: Sequence[GeneratedText],
    steps: int,
    seconds: float,
    before: Figures,
    after: Figures,
) -> HeadFacts:
    training = HeadTraining(
        model=work.loaded.name,
        dataset=work.settings.training_dataset or work.prompts.name,
        prompts_sha256=tuple(prompt_sha256(prompt.token_ids) for prompt in work.training_prompts),
        num_texts=len(texts),
        num_tokens=num_response_tokens(texts),
        temperature=work.settings.temperature,
        steps=steps,
        seconds=seconds,
        before=before[0],
        after=after[0],
        before_by_step=before if len(before) > 1 else (),
        after_by_step=after if len(after) > 1 else (),
        device=device_name(work.target.device),
        versions=versions(),
        identity=work.identity,
    )
    return HeadFacts(
        schema=work.kind.schema,
        exit_layer=exit_layer,
        num_layers=work.target.num_layers,
        architecture=type(work.loaded.model).__name__,
        config_sha256=work.model.config_sha256,
        weights_sha256=work.model.weights_sha256,
        training=training,
    )


def num_response_tokens(texts: Sequence[GeneratedText]) -> int:
    return sum(len(text.response) for text in texts)
