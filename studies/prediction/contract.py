"""The contract of a draft predictor: the speed-up of one kind of draft on surveyed sequences, without decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from torch import Tensor

from decoding.draft_length import DraftLengthRule
from decoding.drafts import KINDS, Draft, DraftDocument
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


class DraftPredictor(ABC, Generic[DraftT]):
    """Predicts the drafts of one kind; `decoding.drafts.KINDS` names the class. It has no state and no settings."""

    is_recorded: ClassVar[bool] = False
    """True if predictions replay a recording, made by `Survey.record_all` from `steps`."""

    @abstractmethod
    def predict(self, draft: DraftT, rule: DraftLengthRule, known: Predictor) -> Prediction:
        """Return the prediction of `draft` with `rule`, from the survey and the costs of `known`."""

    def exits(self, draft: DraftT) -> Collection[int]:
        """Return the exit layers whose hidden states `logits` reads."""
        return ()

    def reads_prompt(self, draft: DraftT) -> bool:
        """Return True if `logits` reads these states of the prompt, too."""
        return False

    def logits(self, draft: DraftT, survey: Survey) -> Iterable[Tensor]:
        """Return the draft's logits [positions, vocabulary] on each surveyed sequence; called for a recorded kind only."""
        raise NotImplementedError(f"{type(self).__name__} predicts without recordings")

    def steps(self, draft: DraftT, survey: Survey) -> Iterable[Iterable[Tensor]]:
        """Return such logits for each step of a round, from the first on, on each surveyed sequence.

        One step is enough where all steps of a round see the same, as states of the target.
        """
        return ([logits] for logits in self.logits(draft, survey))


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
