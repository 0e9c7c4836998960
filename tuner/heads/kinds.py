"""The kinds of heads that a distillation trains, exit heads or a feature head, and the tokens that heads draft from.

The LM head of a small model takes a good part of a draft: a fifth of a pass with 49,152 tokens and 135 million weights. FR-Spec
(arXiv 2502.14856) and EAGLE-3 draft from a quarter of the tokens, the most frequent ones, and verify with all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from decoding.drafts import compact_indices
from decoding.errors import DistillationError
from decoding.exit_heads import EXIT_SCHEMA, FEATURE_HEAD, FEATURE_SCHEMA, head_name
from decoding.target import DraftVocabulary, Target
from decoding.target.heads import new_exit_head, new_feature_head, unrolled
from decoding.target.states import exit_logits, exit_states, last_states
from studies.space import default_exit_layers
from tuner.config import DistillSettings
from tuner.heads.texts import GeneratedText, TrainingBatch

LARGE = 32_768
"""Vocabularies of at least this size are reduced by default; FR-Spec reduces 128k tokens to 32k."""
SHARE = 4


class ExitHeads:
    """Heads of several exits, trained together. Each predicts every step of a round from states of the target."""

    schema = EXIT_SCHEMA
    noun = "exit heads"
    evaluated_steps = 1

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
        return new_exit_head(target, vocabulary)

    def before(self, target: Target) -> Any:
        """Return what an evaluation without a trained head is made with: None, the exit without a head."""
        return None

    def read(self, target: Target, batch: TrainingBatch, layers: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        """Run the target once; return the states that heads after `layers` read, and its logits from `batch.first` on."""
        return exit_states(target, batch.token_ids, layers, first=batch.first)

    def drafted(
        self, target: Target, head: Any, batch: TrainingBatch, states: Tensor, num_steps: int
    ) -> Iterator[Tensor]:
        """Yield the logits of a head for each step of a round."""
        yield exit_logits(target, batch.token_ids, states, head, first=batch.first)


class FeatureHeads:
    """The feature head of a model, after all of its blocks.

    A head reads the target's states in its first step only; in each later step it reads what it put out itself. It is trained on
    both: every training step unrolls a few steps of all rounds at once (training-time test of EAGLE-3, arXiv 2503.01840, section
    3.2). There is no regression on the target's states, as in EAGLE-3: what counts is the distribution.
    """

    schema = FEATURE_SCHEMA
    noun = "feature head"
    evaluated_steps = 4
    """The usual draft length."""

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
        return {"head": "feature", "unrolled_steps": settings.unrolled_steps}

    def file_name(self, layer: int) -> str:
        return FEATURE_HEAD

    def names(self, layers: Sequence[int]) -> str:
        return self.noun if layers else "none"

    def new_head(self, target: Target, vocabulary: DraftVocabulary | None) -> Any:
        return new_feature_head(target, vocabulary)

    def before(self, target: Target) -> Any:
        """Return an untrained head."""
        return new_feature_head(target)

    def read(self, target: Target, batch: TrainingBatch, layers: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        """Run the target once; return its last states, and its logits from `batch.first` on."""
        states, logits = last_states(target, batch.token_ids, first=batch.first)
        return dict.fromkeys(layers, states), logits

    def drafted(
        self, target: Target, head: Any, batch: TrainingBatch, states: Tensor, num_steps: int
    ) -> Iterator[Tensor]:
        """Yield the logits of each step of a round, given that the steps before were accepted."""
        return unrolled(target, head, batch.token_ids, states, num_steps, first=batch.first)


HeadKind = ExitHeads | FeatureHeads
"""What a distillation asks about the heads that it trains; each is known by the number of blocks before it."""
HEAD_KINDS: dict[str, HeadKind] = {"exit": ExitHeads(), "feature": FeatureHeads()}
"""Each kind by its name in the settings."""


def draft_vocabulary_size(target: Target, settings: DistillSettings) -> int | None:
    """Return the number of tokens that heads draft from, or None for all.

    Raises `DistillationError` if a number is asked for and the LM head has no plain rows to choose from.
    """
    rows, wanted = target.lm_heads.num_rows, settings.draft_vocabulary
    if wanted is None:
        return rows // SHARE if rows is not None and rows >= LARGE else None
    if rows is None:
        raise DistillationError(
            "heads of this model draft from all tokens, as its LM head is not a plain linear layer: leave out draft_vocabulary"
        )
    return wanted if wanted < rows else None


def choose_vocabulary(
    target: Target, texts: Sequence[GeneratedText], settings: DistillSettings
) -> DraftVocabulary | None:
    """Return the most frequent tokens of the responses and their prompts, end tokens included; None for all tokens.

    Ties, such as tokens that never occur, go to the lower id: byte-pair encoders number frequent tokens first.
    """
    size = draft_vocabulary_size(target, settings)
    if size is None or target.lm_heads.num_rows is None:
        return None
    counts = Counter(token for text in texts for token in (*text.prompt, *text.response))
    ends = target.model.generation_config.eos_token_id
    counts.update(dict.fromkeys([] if ends is None else ends if isinstance(ends, list) else [ends], len(texts)))
    ranked = [counts[token] for token in range(target.lm_heads.num_rows)]
    return DraftVocabulary.of_most_frequent(size, target.lm_heads.num_rows, ranked)
