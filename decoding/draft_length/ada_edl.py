"""Rules whose stopping threshold follows the acceptance rate: AdaEDL (arXiv 2410.18351) and what shares its Algorithm 1.

AdaEDL compares an entropy-based bound of the acceptance with the threshold; Max-Confidence-SPD, which it is compared with in its
paper (Sections 2 and 4), the draft's top-1 probability, and so does the adaptive exit of Draft & Verify (arXiv 2309.08168, released
code), from which AdaEDL took the update of the threshold.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from enum import Enum, auto
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field

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


class AdaptiveThresholdRule(DraftLengthRule):
    """A rule whose threshold follows Algorithm 1, with the paper's hyperparameters as defaults."""

    if TYPE_CHECKING:  # each form declares them in an order of its own
        initial_threshold: float
        target_acceptance: float
        step: float
        acceptance_decay: float
        threshold_decay: float

    @abstractmethod
    def certainty(self, distribution: DraftDistribution) -> float:
        """Return the value that the threshold is compared with."""

    def starting_at(self, threshold: float) -> Self:
        return self.model_copy(update={"initial_threshold": threshold})


class EntropyBoundRule(AdaptiveThresholdRule):
    """Stop drafting when 1 - sqrt(gamma * H) < threshold, with H the draft's entropy in nats.

    The test precedes the drawing of the next token. Defaults are the paper's, except `initial_threshold`, which the
    paper sweeps. The paper finds gamma between 0 and 1 to work best.
    """

    initial_threshold: float = tunable(0.4, low=0.05, high=0.9, ge=0.0, le=HIGHEST_THRESHOLD, why="lambda at the start")
    gamma: float = tunable(0.2, low=0.02, high=1.0, ge=0.0, le=10.0, log=True, why="weight of the entropy in the bound")
    target_acceptance: TargetAcceptance = 0.9
    step: Step = 0.01
    acceptance_decay: AcceptanceDecay = 0.5
    threshold_decay: ThresholdDecay = 0.9

    def certainty(self, distribution: DraftDistribution) -> float:
        return 1.0 - math.sqrt(self.gamma * max(distribution.entropy, 0.0))


class AdaEdl(EntropyBoundRule):
    """AdaEDL that verifies the token whose pass triggered the stop, as the pass is already paid for (our addition).

    That token stays out of the acceptance rate, so the threshold moves as in the paper. `keep_last=False` is `ada_edl_published`.
    """

    words: ClassVar[str] = "AdaEDL"
    rule: Literal["ada_edl"] = "ada_edl"
    keep_last: bool = Field(
        True, description="draft the token whose pass triggered the stop (ours; the paper drops it)"
    )

    def controller(self) -> AdaptiveThreshold:
        return AdaptiveThreshold(self, LastToken.UNCOUNTED if self.keep_last else LastToken.DROPPED)


class AdaEdlPublished(EntropyBoundRule):
    """AdaEDL to the letter: the token whose pass triggered the stop is dropped (Section 3 and Algorithm 1)."""

    words: ClassVar[str] = "AdaEDL as published"
    rule: Literal["ada_edl_published"] = "ada_edl_published"

    def controller(self) -> AdaptiveThreshold:
        return AdaptiveThreshold(self, LastToken.DROPPED)


class ConfidenceRule(AdaptiveThresholdRule):
    """Stop drafting when the top-1 probability falls below the threshold. Defaults are those of both publications."""

    initial_threshold: float = tunable(
        0.8,
        low=0.1,
        high=0.95,
        ge=0.0,
        le=HIGHEST_THRESHOLD,
        why="top-1 probability below which drafting ends, at the start",
    )
    target_acceptance: TargetAcceptance = 0.9
    step: Step = 0.01
    acceptance_decay: AcceptanceDecay = 0.5
    threshold_decay: ThresholdDecay = 0.9

    def certainty(self, distribution: DraftDistribution) -> float:
        return distribution.top_probability


class MaxConfidence(ConfidenceRule):
    """Max-Confidence-SPD: AdaEDL's Algorithm 1 with the top-1 probability in place of the entropy bound.

    As in AdaEDL, the token whose pass triggered the stop is dropped. The paper sweeps the initial threshold; 0.8 is Draft &
    Verify's.
    """

    words: ClassVar[str] = "confidence threshold"
    rule: Literal["max_confidence"] = "max_confidence"

    def controller(self) -> AdaptiveThreshold:
        return AdaptiveThreshold(self, LastToken.DROPPED)


class AdaptiveExit(ConfidenceRule):
    """Draft & Verify's adaptive exit: the token that is not certain enough is verified too, and counts.

    The threshold rests after drafts of `max_tokens` tokens, accepted or not; in Algorithm 1 all of them must have been accepted.
    Our choice: the top-1 probability decides when sampling too, where the released code takes that of the sampled token.
    """

    words: ClassVar[str] = "adaptive exit"
    rule: Literal["adaptive_exit"] = "adaptive_exit"

    def controller(self) -> AdaptiveThreshold:
        # As in the released code; AdaEDL's paper gives no initial rate.
        return AdaptiveThreshold(self, LastToken.COUNTED, acceptance_rate=0.0)


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

    def __init__(self, rule: AdaptiveThresholdRule, last: LastToken, *, acceptance_rate: float | None = None) -> None:
        super().__init__(rule.max_tokens)
        self._rule, self._last = rule, last
        self._num_uncounted = 0
        self.threshold = rule.initial_threshold
        # Our formulation: a neutral one.
        self.acceptance_rate = rule.target_acceptance if acceptance_rate is None else acceptance_rate

    @property
    def may_stop(self) -> bool:
        return self._last is LastToken.DROPPED

    def decide(self, num_drafted: int, distribution: DraftDistribution) -> Decision:
        """Compare the certainty with the threshold; at least one token is drafted."""
        self._num_uncounted = 0
        if self._rule.certainty(distribution) >= self.threshold:
            return Decision.CONTINUE
        if num_drafted == 0:
            return Decision.LAST
        self._num_uncounted = int(self._last is LastToken.UNCOUNTED)
        return Decision.STOP if self._last is LastToken.DROPPED else Decision.LAST

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Apply lines 7 to 16 of Algorithm 1; a round without drafts changes nothing."""
        if num_drafted == 0:
            return
        rule = self._rule
        num_drafted -= self._num_uncounted
        self._num_uncounted = 0
        num_accepted = min(num_accepted, num_drafted)
        self.acceptance_rate = _blend(rule.acceptance_decay, self.acceptance_rate, num_accepted / num_drafted)
        # If all of the longest draft was accepted, a lower threshold could not have gained a token; released code of
        # Draft & Verify asks for the length alone.
        longest = num_drafted if self._last is LastToken.COUNTED else num_accepted
        moved = self.threshold
        if self.acceptance_rate < rule.target_acceptance:
            moved += rule.step
        elif longest != self.max_tokens:
            moved -= rule.step
        self.threshold = min(max(_blend(rule.threshold_decay, self.threshold, moved), 0.0), HIGHEST_THRESHOLD)

    def adapted_rule(self) -> AdaptiveThresholdRule:
        return self._rule.starting_at(self.threshold)


def _blend(decay: float, old: float, new: float) -> float:
    return decay * old + (1.0 - decay) * new
