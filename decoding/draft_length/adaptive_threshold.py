"""A stopping threshold that follows the acceptance rate: Algorithm 1 of AdaEDL (arXiv 2410.18351, Section 3).

AdaEDL, Max-Confidence with a dynamic threshold (ibid., Section 4), and the adaptive exit of Draft & Verify (arXiv 2309.08168,
released code) share this update. They differ in the certainty that is compared with the threshold.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated, Self

from decoding.draft_length.contract import Controller, Decision, DraftDistribution, DraftLengthRule, tunable

HIGHEST_THRESHOLD = 0.98  # our formulation: at 1 no draft could ever pass again

TargetAcceptance = Annotated[
    float, tunable(low=0.5, high=0.95, ge=0.0, le=1.0, why="alpha: below it the threshold rises")
]
Step = Annotated[
    float, tunable(low=0.005, high=0.2, ge=0.0, le=1.0, log=True, why="epsilon: how far the threshold moves")
]
AcceptanceDecay = Annotated[
    float, tunable(low=0.1, high=0.95, ge=0.0, le=1.0, why="beta1: memory of the acceptance rate")
]
ThresholdDecay = Annotated[float, tunable(low=0.0, high=0.95, ge=0.0, le=1.0, why="beta2: memory of the threshold")]


@dataclass(frozen=True)
class ThresholdUpdate:
    """Lines 7 to 16 of Algorithm 1, with the paper's hyperparameters as defaults."""

    target_acceptance: float = 0.9
    step: float = 0.01
    acceptance_decay: float = 0.5
    threshold_decay: float = 0.9

    def rate(self, before: float, num_drafted: int, num_accepted: int) -> float:
        """Return the acceptance rate after a round of at least one draft."""
        return _blend(self.acceptance_decay, before, num_accepted / num_drafted)

    def threshold(self, before: float, rate: float, *, is_full: bool) -> float:
        """Return the threshold after a round; one that meets the target rate and `is_full` leaves it."""
        if rate < self.target_acceptance:
            moved = before + self.step
        elif not is_full:
            moved = before - self.step
        else:
            moved = before
        return min(max(_blend(self.threshold_decay, before, moved), 0.0), HIGHEST_THRESHOLD)


class AdaptiveThresholdRule(DraftLengthRule):
    """A rule whose threshold follows Algorithm 1. Subclasses declare the settings under the names that are used here."""

    @abstractmethod
    def update(self) -> ThresholdUpdate:
        """Return Algorithm 1 with the settings of the rule."""

    def starting_at(self, threshold: float) -> Self:
        return self.model_copy(update={"initial_threshold": threshold})


class LastToken(Enum):
    """What becomes of the token that is not certain enough; its draft pass has run."""

    DROPPED = auto()
    """It is not drafted, as in AdaEDL's paper."""
    UNCOUNTED = auto()
    """It is verified too, but left out of the acceptance rate: the threshold moves as if it had been dropped."""
    COUNTED = auto()
    """It is verified and counts as any other, as in Draft & Verify's code."""


class AdaptiveThreshold(Controller):
    """The threshold lambda and the running acceptance rate of Algorithm 1.

    `last` says what becomes of the token that is not certain enough. The first token of a round is always drafted and always
    counts (our formulation: without drafts the paper's rate is undefined).
    """

    def __init__(self, rule: AdaptiveThresholdRule, threshold: float, last: LastToken) -> None:
        super().__init__(rule.max_tokens)
        self._rule, self._update, self._last = rule, rule.update(), last
        self._num_uncounted = 0
        self.threshold = threshold
        # Our formulation: AdaEDL's paper gives no initial value; this one is neutral.
        self.acceptance_rate = self._update.target_acceptance

    @abstractmethod
    def certainty(self, distribution: DraftDistribution) -> float:
        """Return the value that the threshold is compared with."""

    @property
    def may_stop(self) -> bool:
        return self._last is LastToken.DROPPED

    def decide(self, num_drafted: int, distribution: DraftDistribution) -> Decision:
        """Compare the certainty with the threshold; at least one token is drafted."""
        self._num_uncounted = 0
        if self.certainty(distribution) >= self.threshold:
            return Decision.CONTINUE
        if num_drafted == 0:
            return Decision.LAST
        self._num_uncounted = int(self._last is LastToken.UNCOUNTED)
        return Decision.STOP if self._last is LastToken.DROPPED else Decision.LAST

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Apply Algorithm 1's update; a round without drafts changes nothing."""
        if num_drafted == 0:
            return
        num_drafted -= self._num_uncounted
        self._num_uncounted = 0
        num_accepted = min(num_accepted, num_drafted)
        self.acceptance_rate = self._update.rate(self.acceptance_rate, num_drafted, num_accepted)
        is_full = self._is_full(num_drafted, num_accepted)
        self.threshold = self._update.threshold(self.threshold, self.acceptance_rate, is_full=is_full)

    def adapted_rule(self) -> AdaptiveThresholdRule:
        return self._rule.starting_at(self.threshold)

    def _is_full(self, num_drafted: int, num_accepted: int) -> bool:
        """Return True if all of the longest draft was accepted: a lower threshold could not have gained a token."""
        return num_accepted == self.max_tokens


def _blend(decay: float, old: float, new: float) -> float:
    return decay * old + (1.0 - decay) * new
