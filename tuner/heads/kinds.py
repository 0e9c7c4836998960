"""The kinds of heads that a distillation trains: exit heads, several at once, or a feature head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from decoding.drafts import compact_indices
from decoding.errors import DistillationError
from decoding.exit_heads import EXIT_SCHEMA, FEATURE_HEAD, FEATURE_SCHEMA, ExitFigures, head_name
from decoding.target import DraftVocabulary, Target
from decoding.target.exit_head import new_exit_head
from decoding.target.feature_head import new_feature_head
from studies.space import default_exit_layers
from tuner.config import DistillSettings
from tuner.heads.evaluation import evaluate
from tuner.heads.feature_training import evaluate_steps, train_unrolled
from tuner.heads.texts import GeneratedText
from tuner.heads.training import TrainStep, train_step

Figures = tuple[ExitFigures, ...]
"""Figures of a draft by the steps of a round; of an exit head one, as it predicts each step from states of the target."""
OnTexts = Callable[[int], None]
"""Callback for evaluated texts: their number."""


class ExitHeads:
    """Heads of several exits, trained together."""

    schema = EXIT_SCHEMA
    noun = "exit heads"

    def layers(self, settings: DistillSettings, target: Target) -> tuple[int, ...]:
        """Return the requested exit layers, or the default ones. Raises `DistillationError` for what the model cannot have."""
        exits = settings.exit_layers or default_exit_layers(target.num_layers)
        if not exits:
            raise DistillationError(f"a model with {target.num_layers} layer has no exit to train a head for")
        for exit_layer in exits:
            try:
                target.check_exit_layer(exit_layer)
            except ValueError as cause:
                raise DistillationError(str(cause)) from None
        return exits

    def decisive(self, settings: DistillSettings) -> dict[str, Any]:
        """Return the settings of this kind that decide the weights, beside those of every kind: none."""
        return {}

    def file_name(self, layer: int) -> str:
        return head_name(layer)

    def names(self, layers: Sequence[int]) -> str:
        return ", ".join(map(str, layers))

    def new_head(self, target: Target, vocabulary: DraftVocabulary | None) -> Any:
        """Return a copy of the last block."""
        return new_exit_head(target, vocabulary)

    def before(self, target: Target) -> Any:
        """Return what an evaluation without a trained head is made with: None, the exit without a head."""
        return None

    def train_step(self, settings: DistillSettings) -> TrainStep:
        return train_step

    def evaluate(
        self,
        target: Target,
        heads: Mapping[int, Any],
        texts: Sequence[GeneratedText],
        batch_size: int,
        on_texts: OnTexts,
    ) -> dict[int, Figures]:
        return {layer: (figures,) for layer, figures in evaluate(target, heads, texts, batch_size, on_texts).items()}


class FeatureHeads:
    """The feature head of a model, after all of its blocks."""

    schema = FEATURE_SCHEMA
    noun = "feature head"

    def layers(self, settings: DistillSettings, target: Target) -> tuple[int, ...]:
        """Return the number of the model's blocks. Refuses exit layers, and a model whose attention masks are unknown."""
        if settings.exit_layers is not None:
            raise DistillationError(
                f"a feature head reads the states after all blocks: leave out exit_layers {compact_indices(settings.exit_layers)}"
            )
        if (reason := target.unmaskable_reason) is not None:
            raise DistillationError(f"no feature head can be trained for this model: {reason}")
        return (target.num_layers,)

    def decisive(self, settings: DistillSettings) -> dict[str, Any]:
        """Return the kind and the number of steps that are unrolled."""
        return {"head": "feature", "unrolled_steps": settings.unrolled_steps}

    def file_name(self, layer: int) -> str:
        return FEATURE_HEAD

    def names(self, layers: Sequence[int]) -> str:
        return self.noun if layers else "none"

    def new_head(self, target: Target, vocabulary: DraftVocabulary | None) -> Any:
        """Return a head around a copy of the last block."""
        return new_feature_head(target, vocabulary)

    def before(self, target: Target) -> Any:
        return new_feature_head(target)

    def train_step(self, settings: DistillSettings) -> TrainStep:
        """Return a step that unrolls as many steps of the head as are set."""
        return partial(train_unrolled, num_steps=settings.unrolled_steps)

    def evaluate(
        self,
        target: Target,
        heads: Mapping[int, Any],
        texts: Sequence[GeneratedText],
        batch_size: int,
        on_texts: OnTexts,
    ) -> dict[int, Figures]:
        return {layer: evaluate_steps(target, head, texts, batch_size, on_texts) for layer, head in heads.items()}


HeadKind = ExitHeads | FeatureHeads
"""What a distillation asks about the heads that it trains; each is known by the number of blocks before it."""
HEAD_KINDS: dict[str, HeadKind] = {"exit": ExitHeads(), "feature": FeatureHeads()}
"""Each kind by its name in the settings."""
