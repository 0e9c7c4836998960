"""AdaEDL (arXiv 2410.18351, Algorithm 1): stop when an entropy-based acceptance bound falls below a moving threshold."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

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

    def update(self) -> ThresholdUpdate:
        return ThresholdUpdate(self.target_acceptance, self.step, self.acceptance_decay, self.threshold_decay)


class AdaEdl(EntropyBoundRule):
    """AdaEDL that verifies the token whose pass triggered the stop, as the pass is already paid for (our addition).

    That token stays out of the acceptance rate, so the threshold moves as in the paper. `keep_last=False` is `ada_edl_published`.
    """

    rule: Literal["ada_edl"] = "ada_edl"
    keep_last: bool = Field(
        True, description="draft the token whose pass triggered the stop (ours; the paper drops it)"
    )

    def controller(self) -> AdaEdlController:
        return AdaEdlController(self, LastToken.UNCOUNTED if self.keep_last else LastToken.DROPPED)


class AdaEdlPublished(EntropyBoundRule):
    """AdaEDL to the letter: the token whose pass triggered the stop is dropped (Section 3 and Algorithm 1)."""

    rule: Literal["ada_edl_published"] = "ada_edl_published"

    def controller(self) -> AdaEdlController:
        return AdaEdlController(self, LastToken.DROPPED)


class AdaEdlController(AdaptiveThreshold):
    def __init__(self, rule: EntropyBoundRule, last: LastToken) -> None:
        super().__init__(rule, rule.initial_threshold, last)
        self._gamma = rule.gamma

    def certainty(self, distribution: DraftDistribution) -> float:
        return 1.0 - math.sqrt(self._gamma * max(distribution.entropy, 0.0))
