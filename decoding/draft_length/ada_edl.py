"""AdaEDL (arXiv 2410.18351, Algorithm 1): stop when an entropy-based acceptance bound falls below a moving threshold."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from decoding.draft_length.contract import Controller, Decision, DraftDistribution, DraftLengthRule, tunable

HIGHEST_THRESHOLD = 0.98  # our formulation: at 1 no draft could ever pass again


class AdaEdl(DraftLengthRule):
    """Stop drafting when 1 - sqrt(gamma * H) < threshold, with H the draft's entropy in nats.

    The test precedes the drawing of the next token. Defaults are the paper's, except `initial_threshold`, which the
    paper sweeps, and `keep_last`, which is our addition: the pass that triggers the stop is already paid for, so its
    token is drafted and verified too. `keep_last=False` is Algorithm 1 unchanged.
    """

    rule: Literal["ada_edl"] = "ada_edl"
    initial_threshold: float = tunable(0.4, low=0.05, high=0.9, ge=0.0, le=HIGHEST_THRESHOLD, why="lambda at the start")
    gamma: float = tunable(0.2, low=0.05, high=0.6, ge=0.0, le=10.0, log=True, why="weight of the entropy in the bound")
    target_acceptance: float = tunable(
        0.9, low=0.5, high=0.95, ge=0.0, le=1.0, why="alpha: below it the threshold rises"
    )
    step: float = tunable(
        0.01, low=0.005, high=0.2, ge=0.0, le=1.0, log=True, why="epsilon: how far the threshold moves"
    )
    acceptance_decay: float = tunable(
        0.5, low=0.1, high=0.95, ge=0.0, le=1.0, why="beta1: memory of the acceptance rate"
    )
    threshold_decay: float = tunable(0.9, low=0.0, high=0.95, ge=0.0, le=1.0, why="beta2: memory of the threshold")
    keep_last: bool = Field(
        True, description="draft the token whose pass triggered the stop (ours; the paper drops it)"
    )

    def controller(self) -> AdaEdlController:
        """Return a controller at the initial threshold."""
        return AdaEdlController(self)


class AdaEdlController(Controller):
    """The threshold lambda and the running acceptance rate of Algorithm 1."""

    def __init__(self, rule: AdaEdl) -> None:
        super().__init__(rule.max_tokens)
        self._rule = rule
        self.threshold = rule.initial_threshold
        # Our formulation: the paper gives no initial value; this one is neutral.
        self.acceptance_rate = rule.target_acceptance

    @property
    def may_stop(self) -> bool:
        """True if the token that ends a draft is dropped, as in Algorithm 1."""
        return not self._rule.keep_last

    def decide(self, num_drafted: int, distribution: DraftDistribution) -> Decision:
        """Compare the acceptance bound with the threshold; at least one token is drafted."""
        bound = 1.0 - math.sqrt(self._rule.gamma * max(distribution.entropy, 0.0))
        if bound >= self.threshold:
            return Decision.CONTINUE
        return Decision.LAST if self._rule.keep_last or num_drafted == 0 else Decision.STOP

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Apply Algorithm 1's update; a round without drafts changes nothing."""
        if num_drafted == 0:
            return
        rule = self._rule
        self.acceptance_rate = _blend(rule.acceptance_decay, self.acceptance_rate, num_accepted / num_drafted)
        if self.acceptance_rate < rule.target_acceptance:
            moved = self.threshold + rule.step
        elif num_accepted != self.max_tokens:
            moved = self.threshold - rule.step
        else:
            moved = self.threshold
        blended = _blend(rule.threshold_decay, self.threshold, moved)
        self.threshold = min(max(blended, 0.0), HIGHEST_THRESHOLD)

    def adapted_rule(self) -> AdaEdl:
        """Return the rule with the current threshold as its initial one."""
        return self._rule.model_copy(update={"initial_threshold": self.threshold})


def _blend(decay: float, old: float, new: float) -> float:
    return decay * old + (1.0 - decay) * new
