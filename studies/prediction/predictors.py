"""The contract of a draft predictor, and the predictors of the draft kinds that come with sdtune: speed-ups without decoding."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from torch import Tensor

from decoding.draft_length import DraftLengthRule
from decoding.drafters.prompt_lookup import look_up
from decoding.drafts import (
    KINDS,
    Draft,
    DraftDocument,
    EarlyExit,
    LayerSkip,
    PlainDecoding,
    PromptLookup,
    SuffixDraft,
)
from studies.prediction.replay import Replayed

if TYPE_CHECKING:
    from studies.prediction.predictor import Predictor
    from studies.prediction.survey import Survey

DraftT = TypeVar("DraftT", bound=DraftDocument)


@dataclass(frozen=True)
class Prediction:
    """A draft with a rule, and the replay of both."""

    draft: Draft
    rule: DraftLengthRule
    replayed: Replayed
    agreement: float
    """Share of positions at which a one-token draft would have been accepted."""
    acceptance: float
    """Mean over positions of sum over v of min(p, q): the acceptance probability of sampling, greedy or not."""

    @property
    def speedup(self) -> float:
        """Predicted speed-up over plain decoding."""
        return self.replayed.speedup


class DraftPredictor(Generic[DraftT]):
    """Predicts the drafts of one kind; `decoding.drafts.KINDS` names the class. It has no state and no settings.

    One that `is_recorded` gives `logits`; another one overrides `predict`.
    """

    is_recorded: ClassVar[bool] = False
    """True if predictions replay a recording, made by `Survey.record_all` from `logits`."""

    def predict(self, draft: DraftT, rule: DraftLengthRule, known: Predictor) -> Prediction:
        """Return the prediction of `draft` with `rule`, from the survey and the costs of `known`."""
        return known.replay_recordings(draft, rule)

    def exits(self, draft: DraftT) -> Collection[int]:
        """Return the exit layers whose hidden states `logits` reads."""
        return ()

    def reads_prompt(self, draft: DraftT) -> bool:
        """Return True if `logits` reads these states of the prompt, too."""
        return False

    def logits(self, draft: DraftT, survey: Survey) -> Iterable[Tensor]:
        """Return the draft's logits [positions, vocabulary] on each surveyed sequence; called for a recorded kind only."""
        raise NotImplementedError(f"{type(self).__name__} predicts without recordings")


def predictor_of(draft: Draft) -> DraftPredictor[Any]:
    """Return the registered predictor of a draft's kind."""
    found: type[DraftPredictor[Any]] = KINDS[draft.kind].load_predictor()
    return found()


def exits_of(drafts: Iterable[Draft]) -> dict[int, bool]:
    """Return the exit layers whose hidden states the predictions of `drafts` read; True if they read the prompt's, too."""
    exits: dict[int, bool] = {}
    for draft in drafts:
        predictor = predictor_of(draft)
        for exit_layer in predictor.exits(draft):
            exits[exit_layer] = exits.get(exit_layer, False) or predictor.reads_prompt(draft)
    return exits


class SkipPredictor(DraftPredictor[LayerSkip]):
    """Predicts skip sets."""

    is_recorded = True

    def logits(self, draft: LayerSkip, survey: Survey) -> Iterable[Tensor]:
        """Run the draft over all rounds of the survey."""
        return survey.skip_logits(draft)


class ExitPredictor(DraftPredictor[EarlyExit]):
    """Predicts early exits, with a head or without."""

    is_recorded = True

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


class CopyPredictor(DraftPredictor[PromptLookup | SuffixDraft]):
    """Predicts drafts that copy: prompt lookup and suffix automaton."""

    def predict(self, draft: PromptLookup | SuffixDraft, rule: DraftLengthRule, known: Predictor) -> Prediction:
        """Replay `rule` on the copies that the draft finds."""
        return known.replay_guesses(draft, rule, partial(look_up, source=draft))


class PlainPredictor(DraftPredictor[PlainDecoding]):
    """Predicts plain decoding: a speed-up of exactly 1."""

    def predict(self, draft: PlainDecoding, rule: DraftLengthRule, known: Predictor) -> Prediction:
        """Count one plain pass for each token."""
        num_tokens, num_parts = known.survey.num_positions, sum(map(len, known.parts.values()))
        replayed = Replayed(num_tokens, num_tokens, 0, float(num_tokens), (1.0,) * num_parts)
        return Prediction(draft, rule, replayed, 0.0, 0.0)
