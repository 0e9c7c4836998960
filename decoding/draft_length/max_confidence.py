"""Stop when the draft's top-1 probability falls below a moving threshold, in two published forms.

Max-Confidence-SPD is what AdaEDL is compared with in its paper (arXiv 2410.18351, Sections 2 and 4). The adaptive exit is Draft &
Verify's (arXiv 2309.08168, released code), from which AdaEDL took the update of the threshold.
"""

from __future__ import annotations

from typing import Literal

from decoding.draft_length.adaptive_threshold import (
    HIGHEST_THRESHOLD,
    AcceptanceDecay,
    AdaptiveThreshold,
    AdaptiveThresholdRule,
    LastToken,
    Step,
    TargetAcceptance,
    ThresholdDecay,
    ThresholdUpdate,
)
from decoding.draft_length.contract import DraftDistribution, tunable


class ConfidenceRule(AdaptiveThresholdRule):
    """Settings of both forms. Defaults of the update are those of both publications."""

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

    def update(self) -> ThresholdUpdate:
        return ThresholdUpdate(self.target_acceptance, self.step, self.acceptance_decay, self.threshold_decay)


class MaxConfidence(ConfidenceRule):
    """Max-Confidence-SPD: AdaEDL's Algorithm 1 with the top-1 probability in place of the entropy bound.

    As in AdaEDL, the token whose pass triggered the stop is dropped. The paper sweeps the initial threshold; 0.8 is Draft &
    Verify's.
    """

    rule: Literal["max_confidence"] = "max_confidence"

    def controller(self) -> ConfidenceController:
        return ConfidenceController(self, LastToken.DROPPED)


class AdaptiveExit(ConfidenceRule):
    """Draft & Verify's adaptive exit: the token that is not certain enough is verified too, and counts.

    The threshold rests after drafts of `max_tokens` tokens, accepted or not; in Algorithm 1 all of them must have been accepted.
    Our choice: the top-1 probability decides when sampling too, where the released code takes that of the sampled token.
    """

    rule: Literal["adaptive_exit"] = "adaptive_exit"

    def controller(self) -> AdaptiveExitController:
        return AdaptiveExitController(self)


class ConfidenceController(AdaptiveThreshold):
    def __init__(self, rule: ConfidenceRule, last: LastToken) -> None:
        super().__init__(rule, rule.initial_threshold, last)

    def certainty(self, distribution: DraftDistribution) -> float:
        return distribution.top_probability


class AdaptiveExitController(ConfidenceController):
    """The threshold of Draft & Verify; its acceptance rate starts at 0, as in the released code."""

    def __init__(self, rule: AdaptiveExit) -> None:
        super().__init__(rule, LastToken.COUNTED)
        self.acceptance_rate = 0.0

    def _is_full(self, num_drafted: int, num_accepted: int) -> bool:
        """Return True if the draft had the greatest length, accepted or not."""
        return num_drafted == self.max_tokens
