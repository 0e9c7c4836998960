"""When each rule stops, and AdaEDL's update by hand."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from decoding.draft_length import RULES, AdaEdl, Decision, DraftDistribution, Fixed, TopProbability
from decoding.draft_length.ada_edl import HIGHEST_THRESHOLD, AdaEdlController


def _of(*probabilities: float) -> DraftDistribution:
    return DraftDistribution(torch.tensor(probabilities).log())


def test_entropy_is_in_nats_and_unharmed_by_removed_tokens() -> None:
    assert _of(0.5, 0.5).entropy == pytest.approx(math.log(2))
    assert _of(0.5, 0.5, 0.0, 0.0).entropy == pytest.approx(math.log(2))
    assert _of(1.0, 0.0).entropy == pytest.approx(0.0)
    assert _of(0.7, 0.2, 0.1).top_probability == pytest.approx(0.7)


def test_a_fixed_length_never_looks_and_never_stops_early() -> None:
    controller = Fixed(max_tokens=5).controller()
    assert controller.limit() == 5
    assert controller.decide(0, DraftDistribution(torch.empty(0))) is Decision.CONTINUE


@pytest.mark.parametrize(("top", "decision"), [(0.59, Decision.LAST), (0.61, Decision.CONTINUE)])
def test_an_unsure_token_is_the_last(top: float, decision: Decision) -> None:
    assert TopProbability(threshold=0.6).controller().decide(3, _of(top, 1 - top)) is decision


def _entropy_of_bound(bound: float, gamma: float) -> DraftDistribution:
    """A two-token distribution whose bound 1 - sqrt(gamma * H) is about `bound`."""
    wanted = (1 - bound) ** 2 / gamma
    low, high = 1e-9, 0.5
    for _ in range(60):
        middle = (low + high) / 2
        entropy = -middle * math.log(middle) - (1 - middle) * math.log(1 - middle)
        low, high = (middle, high) if entropy < wanted else (low, middle)
    return _of(low, 1 - low)


@pytest.mark.parametrize(("bound", "stops"), [(0.69, True), (0.71, False)])
@pytest.mark.parametrize(("keep_last", "at_stop"), [(True, Decision.LAST), (False, Decision.STOP)])
def test_adaedl_stops_when_the_bound_falls_below_the_threshold(
    bound: float, stops: bool, keep_last: bool, at_stop: Decision
) -> None:
    controller = AdaEdl(initial_threshold=0.7, keep_last=keep_last).controller()
    expected = at_stop if stops else Decision.CONTINUE
    assert controller.decide(2, _entropy_of_bound(bound, 0.2)) is expected


def test_adaedl_drafts_one_token_at_least() -> None:
    controller = AdaEdl(initial_threshold=0.9, keep_last=False).controller()
    assert controller.decide(0, _of(0.25, 0.25, 0.25, 0.25)) is Decision.LAST


def test_adaedls_update_on_a_sequence_worked_out_by_hand() -> None:
    # alpha 0.9, epsilon 0.01, beta1 0.5, beta2 0.9, K 8; the acceptance rate starts at alpha.
    controller = AdaEdl(initial_threshold=0.4, max_tokens=8).controller()
    steps = [
        ((4, 2), 0.7, 0.401),  # 0.5 * 0.9 + 0.5 * 0.5; below alpha: 0.9 * 0.4 + 0.1 * 0.41
        ((8, 8), 0.85, 0.402),  # 0.35 + 0.5; still below: 0.9 * 0.401 + 0.1 * 0.411
        ((8, 8), 0.925, 0.402),  # 0.425 + 0.5; above, and all K accepted: unmoved
        ((3, 3), 0.9625, 0.401),  # 0.4625 + 0.5; above, fewer than K accepted: 0.9 * 0.402 + 0.1 * 0.392
        ((0, 0), 0.9625, 0.401),  # nothing drafted says nothing
    ]
    for (drafted, accepted), rate, threshold in steps:
        controller.observe(drafted, accepted)
        assert controller.acceptance_rate == pytest.approx(rate)
        assert controller.threshold == pytest.approx(threshold)


@pytest.mark.parametrize(("accepted", "limit"), [(0, HIGHEST_THRESHOLD), (3, 0.0)])
def test_the_threshold_stays_in_its_range(accepted: int, limit: float) -> None:
    controller = AdaEdl(step=0.5, threshold_decay=0.0, target_acceptance=0.5, max_tokens=8).controller()
    for _ in range(10):
        controller.observe(3, accepted)
    assert controller.threshold == pytest.approx(limit)


def test_each_controller_starts_afresh() -> None:
    rule = AdaEdl()
    first = rule.controller()
    first.observe(8, 0)
    assert isinstance(first, AdaEdlController)
    assert first.threshold != rule.controller().threshold == rule.initial_threshold


@pytest.mark.parametrize("name", RULES)
def test_rules_are_frozen_know_their_name_and_refuse_unknown_settings(name: str) -> None:
    rule = RULES[name](rule=name)
    assert rule.rule == name
    assert name in rule.describe()
    with pytest.raises(ValidationError):
        rule.max_tokens = 3
    with pytest.raises(ValidationError):
        RULES[name](rule=name, made_up=1)
    with pytest.raises(ValidationError):
        RULES[name](rule=name, max_tokens=0)
