"""The predictors of the draft kinds that come with sdtune; `decoding.drafts.KINDS` names them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from decoding.draft_length import DraftLengthRule
from decoding.drafters.prompt_lookup import look_up
from decoding.drafts import EarlyExit, FeatureHeadDraft, LayerSkip, PlainDecoding, PromptLookup, SuffixDraft
from studies.prediction.contract import DraftPredictor, DraftT, Prediction

if TYPE_CHECKING:
    from studies.prediction.predictor import Predictor
    from studies.prediction.survey import Survey


class RecordedPredictor(DraftPredictor[DraftT]):
    """Replays a rule on recordings of the draft's distributions."""

    is_recorded: ClassVar[bool] = True

    def predict(self, draft: DraftT, rule: DraftLengthRule, known: Predictor) -> Prediction:
        """Replay `rule` on the recordings of `draft`."""
        return known.replay_recordings(draft, rule)


class SkipPredictor(RecordedPredictor[LayerSkip]):
    """Predicts skip sets."""

    def logits(self, draft: LayerSkip, survey: Survey) -> Iterable[Tensor]:
        """Run the draft over all rounds of the survey."""
        return survey.skip_logits(draft)


class ExitPredictor(RecordedPredictor[EarlyExit]):
    """Predicts early exits, with a head or without."""

    def exits(self, draft: EarlyExit) -> Collection[int]:
        """Return the exit of the draft, unless it is the skip set of a quantised model."""
        return () if _is_quantised_skip(draft) else (draft.exit_layer,)

    def reads_prompt(self, draft: EarlyExit) -> bool:
        """Return True with a head: it attends to the prompt."""
        return draft.trained_head is not None

    def logits(self, draft: EarlyExit, survey: Survey) -> Iterable[Tensor]:
        """Continue from the target's hidden states at the exit: up to there, draft and target are the same.

        A quantised draft differs from its first block on, and is run over all rounds.
        """
        if _is_quantised_skip(draft):
            return survey.skip_logits(draft.skipped(survey.target.num_layers))
        return survey.exit_logits(draft)


def _is_quantised_skip(draft: EarlyExit) -> bool:
    """Return True for a quantised exit without a head: it runs as the skip of the blocks after it."""
    return draft.parts.bits is not None and draft.trained_head is None


class FeatureHeadPredictor(RecordedPredictor[FeatureHeadDraft]):
    """Predicts feature heads."""

    def steps(self, draft: FeatureHeadDraft, survey: Survey) -> Iterable[Iterable[Tensor]]:
        """Unroll the head from the target's last hidden states: each step of a round has distributions of its own."""
        return survey.feature_steps(draft)


class CopyPredictor(DraftPredictor[PromptLookup | SuffixDraft]):
    """Predicts drafts that copy: prompt lookup and suffix automaton."""

    def predict(self, draft: PromptLookup | SuffixDraft, rule: DraftLengthRule, known: Predictor) -> Prediction:
        """Replay `rule` on the copies that the draft finds."""
        return known.replay_guesses(draft, rule, partial(look_up, source=draft))


class PlainPredictor(DraftPredictor[PlainDecoding]):
    """Predicts plain decoding: a speed-up of exactly 1."""

    def predict(self, draft: PlainDecoding, rule: DraftLengthRule, known: Predictor) -> Prediction:
        """Count one plain pass for each token."""
        return known.replay_plain(draft, rule)
