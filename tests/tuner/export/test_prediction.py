"""The predicted speed-up of an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decoding.draft_length import BetaThompson, Fixed, RoundCosts
from decoding.drafts import Draft, EarlyExit, Lookup
from decoding.profile import DraftProfile, TargetIdentity
from tests.support.measured import measured
from tuner.export.plan import FixedLength, Plan
from tuner.export.prediction import acceptance_of, accepted_per_round, predict
from tuner.export.shape import DraftShape

COSTS = RoundCosts(draft_step=0.25, verify=(0.6, 0.6, 0.6))  # of a verification that resumes after block 2 of 5


def _plan(draft: Draft, *, has_costs: bool = True, **figures: Any) -> Plan:
    target = TargetIdentity(
        model="m", architecture="A", num_layers=5, dtype="float32", config_sha256="c", weights_sha256="w"
    )
    rule = BetaThompson(max_tokens=2, costs=COSTS) if has_costs else Fixed(max_tokens=2)
    profile = DraftProfile(name="p", target=target, draft=draft, draft_length=rule, measured=measured(**figures))
    shape = DraftShape((0, 1), has_head=False, num_target_layers=5)
    length = FixedLength(2, "as asked")
    return Plan(profile, "m", "float32", Path("/out"), shape, length, threshold=None, lookup=None)


def test_the_engine_verifies_with_all_blocks() -> None:
    # Of 2 drafted tokens, accepted with probability 0.5 each: 0.75, and one of the target's own.
    plan = _plan(EarlyExit(exit_layer=2), tokens_per_round=1.75, draft_acceptance_rate=0.375)
    found = predict(plan)
    assert found.value == pytest.approx(1.75 / (1.0 + 2 * 0.25))


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (_plan(EarlyExit(exit_layer=2), has_costs=False), "no costs"),
        (_plan(EarlyExit(exit_layer=2, lookup=Lookup())), "copies"),
    ],
)
def test_what_cannot_be_predicted_says_why(plan: Plan, reason: str) -> None:
    found = predict(plan)
    assert found.value is None
    assert reason in found.explanation


@pytest.mark.parametrize("acceptance", [0.2, 0.7, 0.95])
def test_the_acceptance_is_recovered_from_the_mean_of_a_round(acceptance: float) -> None:
    accepted = accepted_per_round(acceptance, 6)
    figures = measured(tokens_per_round=1 + accepted, draft_acceptance_rate=accepted / 6)
    assert acceptance_of(figures) == pytest.approx(acceptance)
