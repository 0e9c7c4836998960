"""Draft-length rules: the common contract, stopping tests on handmade distributions, AdaEDL's update in numbers."""

from __future__ import annotations

import math
import random

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from decoding.draft_length import (
    RULES,
    AdaEdl,
    AdaEdlPublished,
    AdaptiveExit,
    AnyRule,
    BetaThompson,
    Controller,
    CostAwareRule,
    Decision,
    DraftDistribution,
    DraftLengthRule,
    MaxConfidence,
    RoundCosts,
    TopProbability,
)
from decoding.draft_length.ada_edl import AdaptiveThreshold


def distribution(*probabilities: float) -> DraftDistribution:
    """Scores with these softmax probabilities; 0 is a token that a processor removed."""
    return DraftDistribution(torch.tensor([math.log(p) if p else -math.inf for p in probabilities]) + 3.0)


def uniform(count: int) -> DraftDistribution:
    return distribution(*[1 / count] * count)


CHEAP = RoundCosts(draft_step=0.01, verify=(1.0, 1.0))


def rule_of(name: str, **settings: int) -> DraftLengthRule:
    """Return a rule that is ready to use, by its registered name."""
    rule = RULES[name](**settings)
    return rule.with_costs(CHEAP) if isinstance(rule, CostAwareRule) else rule


def state_of(controller: Controller) -> dict[str, object]:
    """Return the complete state of a controller; random streams by their internal state."""
    state = vars(controller)
    return {name: value.getstate() if isinstance(value, random.Random) else value for name, value in state.items()}


# --- statistics of a distribution ------------------------------------------------------------------------------------------


def test_entropy_is_in_nats_and_removed_tokens_have_no_share() -> None:
    cases: list[tuple[list[float], float, float]] = [
        ([0.25, 0.25, 0.25, 0.25], math.log(4), 0.25),
        ([0.25, 0.75], 0.25 * math.log(4) + 0.75 * math.log(4 / 3), 0.75),  # 0.346574 + 0.215762 nats
        ([0.5, 0.0, 0.5], math.log(2), 0.5),
        ([0.0, 1.0, 0.0], 0.0, 1.0),
    ]
    for probabilities, entropy, top in cases:
        facts = distribution(*probabilities)
        assert facts.entropy == pytest.approx(entropy, abs=1e-6)
        assert facts.top_probability == pytest.approx(top, abs=1e-6)


# --- contract of every rule -----------------------------------------------------------------------------------------------

NOTHING_TO_LEARN = ("fixed", "top_probability")
THRESHOLD = "target_acceptance 0.9, step 0.01, acceptance_decay 0.5, threshold_decay 0.9"
DESCRIPTIONS = {
    "fixed": ("8 tokens a round", ""),
    "top_probability": ("probability threshold, up to 8 tokens", "threshold 0.6"),
    "ada_edl": ("AdaEDL, up to 8 tokens", f"initial_threshold 0.4, gamma 0.2, {THRESHOLD}"),
    "ada_edl_published": ("AdaEDL as published, up to 8 tokens", f"initial_threshold 0.4, gamma 0.2, {THRESHOLD}"),
    "max_confidence": ("confidence threshold, up to 8 tokens", f"initial_threshold 0.8, {THRESHOLD}"),
    "adaptive_exit": ("adaptive exit, up to 8 tokens", f"initial_threshold 0.8, {THRESHOLD}"),
    "beta_thompson": ("Thompson sampling of the length, up to 8 tokens", "forgetting 0.97"),
}


@pytest.mark.parametrize("name", RULES)
class TestEveryRule:
    def test_its_document_is_strict_and_says_what_is_worth_searching(self, name: str) -> None:
        rule = RULES[name]()
        assert rule.rule == name
        assert not rule.persistent, "its state is reset for each sequence"
        assert TypeAdapter(AnyRule).validate_python(rule.model_dump()) == rule
        assert (rule_of(name).describe(), rule_of(name).parameters()) == DESCRIPTIONS[name]
        with pytest.raises(ValidationError, match="extra_forbidden"):
            RULES[name](tokens=3)
        with pytest.raises(ValidationError, match="frozen"):
            rule.max_tokens = 3
        for max_tokens in (0, -1, 65):
            with pytest.raises(ValidationError, match="max_tokens"):
                RULES[name](max_tokens=max_tokens)

    def test_its_controller_drafts_at_most_max_tokens(self, name: str) -> None:
        controller = rule_of(name, max_tokens=5).controller()
        limits = []
        for _ in range(100):
            limits.append(controller.limit())
            controller.observe(limits[-1], limits[-1])
        assert controller.max_tokens == max(limits) == 5
        assert min(limits) >= 0

    def test_its_controllers_share_no_state(self, name: str) -> None:
        rule = rule_of(name)
        told, fresh = rule.controller(), rule.controller()
        for _ in range(300):
            told.limit()
            told.decide(0, distribution(0.5, 0.5))
            told.observe(num_drafted=4, num_accepted=0)
        assert state_of(fresh) == state_of(rule.controller())

    def test_it_continues_after_a_certain_token_whatever_came_before(self, name: str) -> None:
        controller = rule_of(name).controller()
        for outcome in [(4, 0), (4, 4), (1, 1), (0, 0)] * 50:
            controller.limit()
            controller.decide(0, uniform(2))
            controller.observe(*outcome)
            controller.limit()
            assert controller.decide(2, distribution(0.0, 1.0, 0.0)) is Decision.CONTINUE

    def test_range_worth_searching_lies_within_the_allowed(self, name: str) -> None:
        searched = 0
        for field, schema in RULES[name].model_json_schema()["properties"].items():
            if (search := schema.get("search")) is not None:
                searched += 1
                assert search["low"] < search["high"]
                assert not search["log"] or search["low"] > 0
                for value in (search["low"], search["high"]):
                    RULES[name](**{field: value})
        assert searched > 0

    def test_adapted_rule_is_of_the_same_kind_or_none(self, name: str) -> None:
        rule = rule_of(name)
        controller = rule.controller()
        for _ in range(20):
            controller.decide(0, distribution(0.97, 0.03))
            controller.observe(num_drafted=4, num_accepted=0)
        adapted = controller.adapted_rule()
        assert (adapted is None) == (name in NOTHING_TO_LEARN)
        if adapted is not None:
            assert type(adapted) is type(rule)
            assert adapted != rule
            assert TypeAdapter(AnyRule).validate_python(adapted.model_dump(mode="json")) == adapted


# --- top probability ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threshold", "decision"), [(0.74, Decision.CONTINUE), (0.76, Decision.LAST), (0.0, Decision.CONTINUE)]
)
def test_token_below_the_threshold_is_the_last(threshold: float, decision: Decision) -> None:
    num_drafted = 3
    controller = TopProbability(threshold=threshold).controller()
    assert controller.decide(num_drafted, distribution(0.75, 0.25)) is decision


# --- AdaEDL -----------------------------------------------------------------------------------------------------------------


def ada_edl(**settings: float | bool) -> AdaptiveThreshold:
    return AdaEdl(**settings).controller()


# 1 - sqrt(0.2 * ln 4) = 1 - sqrt(0.277259) = 1 - 0.526554 = 0.473446
BOUND_OF_FOUR = 0.473446


def test_token_whose_pass_triggers_the_stop_is_kept_only_with_keep_last() -> None:
    threshold = BOUND_OF_FOUR + 1e-4
    assert ada_edl(initial_threshold=threshold, keep_last=True).decide(2, uniform(4)) is Decision.LAST
    assert ada_edl(initial_threshold=threshold, keep_last=False).decide(2, uniform(4)) is Decision.STOP


def test_at_least_one_token_is_drafted() -> None:
    for keep_last in (True, False):
        controller = ada_edl(initial_threshold=0.9, keep_last=keep_last)
        assert controller.decide(0, uniform(50)) is Decision.LAST


def test_bound_is_one_minus_the_root_of_gamma_times_entropy() -> None:
    cases: list[tuple[list[float], float, float]] = [
        ([0.5, 0.5], 0.2, 0.627671),  # 1 - sqrt(0.2 * 0.693147) = 1 - sqrt(0.138629) = 1 - 0.372329
        ([0.25, 0.75], 0.2, 0.664639),  # 1 - sqrt(0.2 * 0.562335) = 1 - sqrt(0.112467) = 1 - 0.335361
        ([0.5, 0.5], 0.05, 0.813835),  # 1 - sqrt(0.05 * 0.693147) = 1 - sqrt(0.034657) = 1 - 0.186165
    ]
    for probabilities, gamma, bound in cases:
        below, above = (ada_edl(initial_threshold=bound + sign * 1e-5, gamma=gamma) for sign in (-1, 1))
        assert below.decide(1, distribution(*probabilities)) is Decision.CONTINUE
        assert above.decide(1, distribution(*probabilities)) is Decision.LAST


def test_update_follows_algorithm_1() -> None:
    controller = ada_edl(
        max_tokens=4,
        initial_threshold=0.4,
        target_acceptance=0.9,
        step=0.01,
        acceptance_decay=0.5,
        threshold_decay=0.9,
    )
    # The rate starts at the target: 0.9.
    expected = [
        # drafted, accepted, rate, threshold
        # rate 0.5 * 0.9 + 0.5 * 2/4 = 0.7 < 0.9, so 0.4 + 0.01; threshold 0.9 * 0.4 + 0.1 * 0.41
        (4, 2, 0.7, 0.401),
        # rate 0.5 * 0.7 + 0.5 * 2/2 = 0.85 < 0.9, so 0.401 + 0.01; threshold 0.9 * 0.401 + 0.1 * 0.411
        (2, 2, 0.85, 0.402),
        # rate 0.5 * 0.85 + 0.5 * 4/4 = 0.925, and all K = 4 were accepted: the threshold stays
        (4, 4, 0.925, 0.402),
        # rate 0.5 * 0.925 + 0.5 * 3/3 = 0.9625, but 3 is not K: 0.402 - 0.01; threshold 0.9 * 0.402 + 0.1 * 0.392
        (3, 3, 0.9625, 0.401),
        # nothing drafted, nothing updated
        (0, 0, 0.9625, 0.401),
        # rate 0.5 * 0.9625 + 0.5 * 0/3 = 0.48125 < 0.9, so 0.401 + 0.01; threshold 0.9 * 0.401 + 0.1 * 0.411
        (3, 0, 0.48125, 0.402),
        # rate 0.5 * 0.48125 + 0.5 * 1/1 = 0.740625 < 0.9, so 0.402 + 0.01; threshold 0.9 * 0.402 + 0.1 * 0.412
        (1, 1, 0.740625, 0.403),
    ]
    for num_drafted, num_accepted, rate, threshold in expected:
        controller.observe(num_drafted, num_accepted)
        assert controller.acceptance_rate == pytest.approx(rate, abs=1e-12)
        assert controller.threshold == pytest.approx(threshold, abs=1e-12)


def test_token_kept_after_the_stop_leaves_the_threshold_where_algorithm_1_takes_it() -> None:
    stream = random.Random(0)
    kept, dropped = (ada_edl(max_tokens=7, initial_threshold=0.7, keep_last=keep) for keep in (True, False))
    lengths = set()
    for _ in range(400):
        # Unsure tokens are often rejected, as in real drafts.
        sure = [stream.random() < 0.7 for _ in range(7)]
        accepted = [stream.random() < (0.95 if each else 0.4) for each in sure]
        drafted = [_round(each, sure, accepted) for each in (kept, dropped)]
        lengths.add(drafted[0] - drafted[1])
        assert kept.threshold == pytest.approx(dropped.threshold, abs=1e-12)
    assert lengths == {0, 1}, (
        "the rules differ in the kept token, and agree where the whole draft or its first token is unsure"
    )
    assert dropped.threshold != pytest.approx(0.7, abs=0.01)


def _round(controller: AdaptiveThreshold, sure: list[bool], accepted: list[bool]) -> int:
    """Draft and observe one round, and return its length."""
    num_drafted, decision = 0, Decision.CONTINUE
    while num_drafted < min(controller.max_tokens, len(sure)) and decision is Decision.CONTINUE:
        decision = controller.decide(num_drafted, uniform(1) if sure[num_drafted] else uniform(50))
        num_drafted += decision is not Decision.STOP
    tested = accepted[:num_drafted]
    controller.observe(num_drafted, tested.index(False) if False in tested else num_drafted)
    return num_drafted


def test_threshold_stays_between_zero_and_the_highest() -> None:
    settings = {"max_tokens": 4, "initial_threshold": 0.5, "step": 1.0, "threshold_decay": 0.0}
    rising, falling = ada_edl(**settings, target_acceptance=0.9), ada_edl(**settings, target_acceptance=0.0)
    rising.observe(4, 0)
    falling.observe(4, 0)
    assert (rising.threshold, falling.threshold) == (0.98, 0.0)


def test_adapted_rule_starts_at_the_threshold_reached() -> None:
    controller = ada_edl(max_tokens=4, initial_threshold=0.4, step=0.5, threshold_decay=0.0)
    controller.observe(4, 0)
    assert controller.adapted_rule() == AdaEdl(max_tokens=4, initial_threshold=0.9, step=0.5, threshold_decay=0.0)
    assert controller.adapted_rule().controller().threshold == pytest.approx(0.9)


def test_published_ada_edl_is_ada_edl_that_drops_the_last_token() -> None:
    published, ours = AdaEdlPublished(initial_threshold=0.7), AdaEdl(initial_threshold=0.7, keep_last=False)
    assert published.model_dump(exclude={"rule"}) == ours.model_dump(exclude={"rule", "keep_last"})
    stream = random.Random(1)
    left, right = published.controller(), ours.controller()
    for _ in range(100):
        sure = [stream.random() < 0.8 for _ in range(8)]
        assert _round(left, sure, sure) == _round(right, sure, sure)
        assert left.threshold == right.threshold
    assert left.may_stop


# --- top probability with a moving threshold ----------------------------------------------------------------------------


def test_max_confidence_drops_the_token_below_the_threshold() -> None:
    controller = MaxConfidence(initial_threshold=0.7).controller()
    assert controller.may_stop
    assert controller.decide(2, distribution(0.75, 0.25)) is Decision.CONTINUE
    assert controller.decide(2, distribution(0.65, 0.35)) is Decision.STOP
    assert controller.decide(0, distribution(0.65, 0.35)) is Decision.LAST


def test_adaptive_exit_keeps_the_token_below_the_threshold() -> None:
    controller = AdaptiveExit(initial_threshold=0.7).controller()
    assert not controller.may_stop
    assert controller.decide(2, distribution(0.75, 0.25)) is Decision.CONTINUE
    for num_drafted in (0, 2):
        assert controller.decide(num_drafted, distribution(0.65, 0.35)) is Decision.LAST


def test_adaptive_exit_follows_the_released_code() -> None:
    """Expected values by hand from `decoding.py` of Draft & Verify, `auto_parameters` 1, .5, .9, .01, .9."""
    controller = AdaptiveExit(max_tokens=4, initial_threshold=0.8).controller()
    assert controller.acceptance_rate == 0.0
    expected = [
        # drafted, accepted, rate, threshold
        (4, 4, 0.5, 0.801),
        (3, 3, 0.75, 0.802),
        (4, 4, 0.875, 0.803),
        # rate 0.9375: met; a draft of 4 is the longest, so the threshold stays
        (4, 4, 0.9375, 0.803),
        # rate 0.96875; 2 is not 4: down
        (2, 2, 0.96875, 0.802),
        (1, 1, 0.984375, 0.801),
        # rate 0.4921875: missed, so up
        (4, 0, 0.4921875, 0.802),
    ]
    for num_drafted, num_accepted, rate, threshold in expected:
        controller.observe(num_drafted, num_accepted)
        assert controller.acceptance_rate == pytest.approx(rate, abs=1e-12)
        assert controller.threshold == pytest.approx(threshold, abs=1e-12)


# --- cost-aware rules ---------------------------------------------------------------------------------------------------


def test_cost_of_a_round_is_its_draft_passes_and_its_verification() -> None:
    costs = RoundCosts(draft_step=0.3, verify=(1.0, 1.2, 1.5))
    assert [costs.of(length) for length in range(3)] == pytest.approx([1.0, 1.5, 2.1])


def test_verification_wider_than_those_measured_is_extrapolated() -> None:
    cases: list[tuple[tuple[float, ...], float]] = [
        ((1.0, 1.2, 1.5), 2.1),  # 1.5 + 2 * (1.5 - 1.2)
        ((1.0, 1.4, 1.3), 1.3),  # a falling last step is not extrapolated
    ]
    for verify, beyond in cases:
        assert RoundCosts(draft_step=0.25, verify=verify).of(4) == pytest.approx(beyond + 4 * 0.25)


def test_costs_are_positive_and_finite() -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"draft_step": 0.0, "verify": (1.0, 1.1)}, "draft_step\n.*greater than 0"),
        ({"draft_step": math.inf, "verify": (1.0, 1.1)}, "draft_step\n.*finite"),
        ({"draft_step": 0.1, "verify": (1.0,)}, "verify\n.*at least 2"),
        ({"draft_step": 0.1, "verify": (1.0, -1.0)}, "verify.1\n.*greater than 0"),
        ({"draft_step": 0.1, "verify": (1.0, math.nan)}, "verify.1\n.*finite"),
    ]
    for settings, message in cases:
        with pytest.raises(ValidationError, match=message):
            RoundCosts(**settings)


def test_rule_without_costs_has_no_controller() -> None:
    rule = BetaThompson()
    with pytest.raises(ValueError, match="the rule 'beta_thompson' has no costs"):
        rule.controller()
    ready = rule.with_costs(CHEAP)
    assert rule.costs is None
    assert ready == rule.model_copy(update={"costs": CHEAP})
    ready.controller()
