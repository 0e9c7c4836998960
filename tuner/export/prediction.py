"""The speed-up that an export is predicted to have: the engine's rules, the profile's costs and acceptance (our formulation).

An engine drafts a fixed number of tokens with a model of its own, and verifies with the whole target. The profile's own speed-up
does not transfer: it has shared weights and keys, a rule, lookups, and a verification that resumes after the blocks that the draft
has run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decoding.profile import Measured
    from tuner.export.plan import Plan

BISECTIONS = 60


@dataclass(frozen=True)
class PredictedSpeedup:
    """Predicted speed-up of the decode phase over the engine's plain decoding; None if it cannot be predicted."""

    value: float | None
    explanation: str


def predict(plan: Plan) -> PredictedSpeedup:
    """Return the predicted speed-up of a draft model, for one sequence, or the reason why there is none."""
    profile = plan.profile
    costs, measured = profile.draft_length.known_round_costs, profile.measured
    if plan.shape is None:
        return PredictedSpeedup(None, "a lookup's copies are not predicted")
    if measured is None:
        return PredictedSpeedup(None, "the profile has no measured figures")
    if costs is None:
        return PredictedSpeedup(None, "the profile carries no costs of draft steps and verifications")
    if profile.draft.parts.lookup is not None:
        return PredictedSpeedup(None, "the profile's acceptance mixes copies and the draft's own tokens")
    num_tokens = plan.length.num_tokens
    shared = profile.draft.num_shared_blocks if profile.decoding.prefix_reuse else 0
    whole_pass = costs.verify_cost(num_tokens) + shared / plan.shape.num_target_layers
    per_round = 1 + accepted_per_round(acceptance_of(measured), num_tokens)
    value = per_round / (whole_pass + num_tokens * costs.draft_step)
    return PredictedSpeedup(
        value,
        f"{per_round:.2f} tokens per round of {num_tokens} draft steps at {costs.draft_step:.3f} plain passes each and a "
        f"verification at {whole_pass:.3f}, by the costs in the profile",
    )


def accepted_per_round(acceptance: float, num_tokens: int) -> float:
    """Return the expected accepted tokens of `num_tokens` drafted ones, each accepted with the same probability.

    Leviathan et al., arXiv 2211.17192, equation 1.
    """
    return sum(acceptance**index for index in range(1, num_tokens + 1))


def acceptance_of(measured: Measured) -> float:
    """Return the probability per token that explains the profile's accepted tokens per round, by bisection."""
    accepted = measured.tokens_per_round - 1
    if measured.draft_acceptance_rate <= 0 or accepted <= 0:
        return 0.0
    drafted = max(round(accepted / measured.draft_acceptance_rate), 1)
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted_per_round(middle, drafted) < accepted else (low, middle)
    return (low + high) / 2
