"""Rules without state: a fixed length (Leviathan et al., arXiv 2211.17192), and a fixed threshold.

The threshold is the rule that ConfLayers decodes with (released code), and Draft & Verify's (arXiv 2309.08168) without its moving
threshold.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from decoding.draft_length.contract import Controller, Decision, DraftDistribution, DraftLengthRule, tunable


class Fixed(DraftLengthRule):
    """Draft exactly `max_tokens` every round."""

    rule: Literal["fixed"] = "fixed"

    @property
    def is_fixed(self) -> bool:
        return True

    def controller(self) -> Controller:
        return Controller(self.max_tokens)

    def describe(self) -> str:
        return f"{self.max_tokens} token{'s' if self.max_tokens > 1 else ''} a round"


class TopProbability(DraftLengthRule):
    """Stop when the draft's top-1 probability falls below `threshold`.

    The uncertain token is verified too, because its pass is already paid for.
    """

    words: ClassVar[str] = "probability threshold"
    rule: Literal["top_probability"] = "top_probability"
    threshold: float = tunable(
        0.6, low=0.1, high=0.95, ge=0.0, le=1.0, why="top-1 probability below which drafting ends"
    )

    @property
    def fixed_threshold(self) -> float | None:
        return self.threshold

    def controller(self) -> Controller:
        return _TopProbabilityController(self)


class _TopProbabilityController(Controller):
    def __init__(self, rule: TopProbability) -> None:
        super().__init__(rule.max_tokens)
        self._threshold = rule.threshold

    @property
    def may_stop(self) -> bool:
        return False

    def decide(self, num_drafted: int, distribution: DraftDistribution) -> Decision:
        return Decision.LAST if distribution.top_probability < self._threshold else Decision.CONTINUE
