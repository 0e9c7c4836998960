"""The Thompson rule, simulated without a model: convergence, cost of exploring, adaptation.

A simulated sequence consists of a draft's top-1 probabilities and its accuracy at each. Costs are in plain passes,
speeds in tokens per plain pass, so plain decoding is 1 on any machine. All streams are seeded: every figure is the
same in every run.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from decoding.documents.strict_yaml import dump, read_mapping, validate
from decoding.draft_length import (
    AnyRule,
    BetaThompson,
    Controller,
    Decision,
    DraftDistribution,
    RoundCosts,
)
from decoding.draft_length.beta_thompson import WARM_TOKENS, BetaPosterior, BetaThompsonController
from decoding.errors import ProfileError

K = 8

SimulatedSequence = Callable[[random.Random], tuple[float, float]]
"""The next draft: its top-1 probability, and the probability that it is accepted."""


def costs_of(draft_step: float, verify_step: float) -> RoundCosts:
    return RoundCosts(draft_step=draft_step, verify=tuple(1.0 + verify_step * length for length in range(K + 1)))


HALF = costs_of(0.5, 0.05)
THIRD = costs_of(0.3, 0.05)
CHEAP = costs_of(0.1, 0.02)


class Confidence(DraftDistribution):
    """A distribution of which only the top probability is known."""

    def __init__(self, top_probability: float) -> None:
        self.__dict__["top_probability"] = top_probability


def equally_good(acceptance: float) -> SimulatedSequence:
    """Return a draft whose confidence carries no information."""
    return lambda stream: (stream.choice([0.5, 0.85, 0.97]), acceptance)


def surely_or_not(share: float) -> SimulatedSequence:
    """Return a calibrated draft: nearly certain for this share of the tokens, unsure otherwise."""

    def text(stream: random.Random) -> tuple[float, float]:
        certainty = 0.97 if stream.random() < share else 0.3
        return certainty, certainty

    return text


def overconfident(stream: random.Random) -> tuple[float, float]:
    """Certain, and always wrong."""
    return 0.97, 0.0


@dataclass
class Written:
    """The result of a simulation."""

    tokens: int
    cost: float
    lengths: list[int]

    @property
    def speed(self) -> float:
        return self.tokens / self.cost


def write(
    controller: Controller, costs: RoundCosts, text: SimulatedSequence, *, num_rounds: int, seed: int, room: int = K
) -> Written:
    """Simulate rounds of drafting as in `decoding.drafters.propose`, with `room` for that many drafts per round."""
    stream = random.Random(f"text {seed}")
    written = Written(0, 0.0, [])
    for _ in range(num_rounds):
        limit = min(controller.limit(), room)
        length = num_accepted = 0
        right, decision = True, Decision.CONTINUE
        while length < limit and decision is Decision.CONTINUE:
            certainty, acceptance = text(stream)
            decision = controller.decide(length, Confidence(certainty))
            assert decision is not Decision.STOP, "the pass is paid for: its token is verified"
            length += 1
            right = right and stream.random() < acceptance
            num_accepted += right
        controller.observe(length, num_accepted)
        written.tokens += num_accepted + 1
        written.cost += costs.of(length)
        written.lengths.append(length)
    return written


def expected_speed(lengths: Sequence[int], acceptance: float, costs: RoundCosts) -> float:
    """Return the speed of rounds of these lengths at a constant acceptance probability."""
    tokens = sum(acceptance**index for length in lengths for index in range(length + 1))
    return tokens / sum(costs.of(length) for length in lengths)


def best_length(acceptance: float, costs: RoundCosts) -> int:
    return max(range(K + 1), key=lambda length: expected_speed([length], acceptance, costs))


def mean_speed(
    rule: BetaThompson, costs: RoundCosts, text: SimulatedSequence, *, num_rounds: int, num_texts: int = 10
) -> float:
    """Return the mean speed over sequences that each start without history."""
    speeds = [
        write(
            rule.model_copy(update={"seed": seed, "costs": costs}).controller(),
            costs,
            text,
            num_rounds=num_rounds,
            seed=seed,
        ).speed
        for seed in range(num_texts)
    ]
    return statistics.mean(speeds)


# --- convergence --------------------------------------------------------------------------------------------------------

OPTIMA = [(0.4, HALF, 0), (0.9, HALF, 3), (0.95, CHEAP, 8)]


@pytest.mark.parametrize(("acceptance", "costs", "optimum"), OPTIMA)
def test_length_settles_at_the_optimum_of_the_costs(acceptance: float, costs: RoundCosts, optimum: int) -> None:
    assert best_length(acceptance, costs) == optimum
    settled: list[int] = []
    for seed in range(4):
        controller = BetaThompson(seed=seed).with_costs(costs).controller()
        settled += write(controller, costs, equally_good(acceptance), num_rounds=500, seed=seed).lengths[200:]
    best = expected_speed([optimum], acceptance, costs)
    assert expected_speed(settled, acceptance, costs) > 0.96 * best
    if optimum in (0, K):
        assert Counter(settled).most_common(1)[0][0] == optimum
    else:
        assert statistics.mean(settled) == pytest.approx(optimum, rel=0.35)


def test_useless_draft_costs_less_than_three_percent() -> None:
    for text in (equally_good(0.0), overconfident):
        speed = mean_speed(BetaThompson(), HALF, text, num_rounds=500)
        assert 0.97 < speed < 1.0, "the draft is abandoned, but not for ever"


# --- adaptation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.9, 0.0)], ids=["better", "worse"])
def test_rule_adapts_when_the_sequence_changes(before: float, after: float) -> None:
    late: list[int] = []
    for seed in range(4):
        controller = BetaThompson(seed=seed).with_costs(THIRD).controller()
        write(controller, THIRD, equally_good(before), num_rounds=300, seed=seed)
        late += write(controller, THIRD, equally_good(after), num_rounds=200, seed=seed + 100).lengths[100:]
    best = expected_speed([best_length(after, THIRD)], after, THIRD)
    assert expected_speed(late, after, THIRD) > 0.94 * best


def test_warm_start_saves_the_warm_up_of_a_sequence() -> None:
    text = equally_good(0.9)
    controller = BetaThompson().with_costs(HALF).controller()
    write(controller, HALF, text, num_rounds=200, seed=100)
    warm = controller.adapted_rule()
    assert isinstance(warm, BetaThompson)
    cold_speed, warm_speed = (mean_speed(start, HALF, text, num_rounds=25) for start in (BetaThompson(), warm))
    assert warm_speed > 1.02 * cold_speed


# --- updates after a round ------------------------------------------------------------------------------------------------


def beta(**settings: object) -> BetaThompsonController:
    return BetaThompson(costs=HALF, **settings).controller()


def test_beta_rule_counts_tested_tokens() -> None:
    # Of four the last is not tested after a rejection; fewer than requested: the sequence was about to end.
    for outcome, counted in {(4, 2): (2, 1), (4, 0): (0, 1), (4, 4): (4, 0), (2, 2): (2, 0), (0, 0): (0, 0)}.items():
        controller = beta(forgetting=1.0)
        controller.observe(*outcome)
        assert controller.acceptance == BetaPosterior(1.0 + counted[0], 1.0 + counted[1])


def test_beta_rule_forgets_towards_uniform_and_less_without_drafts() -> None:
    controller = beta(prior=(5.0, 3.0), forgetting=0.9)
    controller.observe(3, 1)
    # 1 + 0.9 * (5 - 1) + 1 and 1 + 0.9 * (3 - 1) + 1
    assert (controller.acceptance.accepted, controller.acceptance.rejected) == pytest.approx((5.6, 3.8))
    controller.observe(0, 0)
    # 0.9 ** (1/4) = 0.974004: 1 + 0.974004 * 4.6 and 1 + 0.974004 * 2.8
    assert (controller.acceptance.accepted, controller.acceptance.rejected) == pytest.approx((5.480417, 3.727211))
    for _ in range(2000):
        controller.observe(0, 0)
    assert (controller.acceptance.accepted, controller.acceptance.rejected) == pytest.approx((1.0, 1.0))


def test_sequences_near_their_end_are_drafted_and_observed() -> None:
    for room in (0, 1, 3):
        controller = BetaThompson(costs=CHEAP).controller()
        written = write(controller, CHEAP, equally_good(1.0), num_rounds=100, seed=0, room=room)
        assert max(written.lengths) == room
        adapted = controller.adapted_rule()
        assert isinstance(adapted, BetaThompson)
        assert (adapted.prior != BetaThompson().prior) == (room > 0)


# --- posteriors -----------------------------------------------------------------------------------------------------------


def test_warm_start_keeps_the_proportions_and_little_of_the_evidence() -> None:
    accepted, rejected = BetaPosterior(81.0, 21.0).warm_start()
    # Of 100 tested tokens, 80 accepted, `WARM_TOKENS` are kept.
    assert (accepted, rejected) == pytest.approx((1.0 + WARM_TOKENS * 0.8, 1.0 + WARM_TOKENS * 0.2))
    assert BetaPosterior(3.0, 2.0).warm_start() == (3.0, 2.0)


# --- adapted rules can be stored ------------------------------------------------------------------------------------------


def test_adapted_rule_round_trips_through_yaml_and_decides_alike(tmp_path: Path) -> None:
    controller = BetaThompson(persistent=True, costs=THIRD).controller()
    write(controller, THIRD, surely_or_not(0.8), num_rounds=100, seed=0)
    adapted = controller.adapted_rule()
    assert isinstance(adapted, BetaThompson)
    (tmp_path / "rule.yaml").write_text(dump(adapted), encoding="utf-8")
    read = validate(
        BetaThompson,
        read_mapping(tmp_path / "rule.yaml", what="rule", error=ProfileError),
        source="",
        error=ProfileError,
    )
    assert read == adapted == TypeAdapter(AnyRule).validate_python(adapted.model_dump())
    assert (read.costs, read.persistent) == (THIRD, True)
    first, second = (
        write(start.controller(), THIRD, surely_or_not(0.8), num_rounds=50, seed=1) for start in (adapted, read)
    )
    assert first == second


# --- private random streams -------------------------------------------------------------------------------------------------


def test_same_seed_same_decisions_and_another_seed_others() -> None:
    def lengths(seed: int) -> list[int]:
        controller = BetaThompson(seed=seed, costs=THIRD).controller()
        return write(controller, THIRD, surely_or_not(0.6), num_rounds=100, seed=0).lengths

    assert lengths(1) == lengths(1) != lengths(2)


# --- invalid settings ---------------------------------------------------------------------------------------------------------


IMPOSSIBLE: list[tuple[dict[str, object], str]] = [
    ({"prior": (0.0, 1.0)}, "prior.0\n.*greater than 0"),
    ({"forgetting": 1.1}, "forgetting\n.*less than or equal to 1"),
    ({"seed": -1}, "seed\n.*greater than or equal to 0"),
]


def test_impossible_settings_are_refused() -> None:
    for settings, message in IMPOSSIBLE:
        with pytest.raises(ValidationError, match=message):
            BetaThompson(**settings)
