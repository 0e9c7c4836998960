"""The Thompson rules, simulated without a model: convergence, cost of exploring, adaptation.

A simulated sequence consists of a draft's top-1 probabilities and its accuracy at each. Costs are in plain passes,
speeds in tokens per plain pass, so plain decoding is 1 on any machine. All streams are seeded: every figure is the
same in every run.
"""

from __future__ import annotations

import itertools
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
    CalibratedThompson,
    Controller,
    CostAwareRule,
    Decision,
    DraftDistribution,
    RoundCosts,
)
from decoding.draft_length.beta_thompson import BetaThompsonController
from decoding.draft_length.calibrated_thompson import AS_CONFIDENT, BINS, NO_GAIN, CalibratedThompsonController
from decoding.draft_length.posteriors import (
    UNIFORM,
    WARM_ROUNDS,
    WARM_TOKENS,
    BetaPosterior,
    GainPosterior,
    GainPrior,
    warm_start,
)
from decoding.errors import ProfileError

K = 8
BOTH = [BetaThompson, CalibratedThompson]

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
    rule: CostAwareRule, costs: RoundCosts, text: SimulatedSequence, *, num_rounds: int, num_texts: int = 10
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
@pytest.mark.parametrize("rule", BOTH)
def test_length_settles_at_the_optimum_of_the_costs(
    rule: type[CostAwareRule], acceptance: float, costs: RoundCosts, optimum: int
) -> None:
    assert best_length(acceptance, costs) == optimum
    settled: list[int] = []
    for seed in range(4):
        controller = rule(seed=seed).with_costs(costs).controller()
        settled += write(controller, costs, equally_good(acceptance), num_rounds=500, seed=seed).lengths[200:]
    best = expected_speed([optimum], acceptance, costs)
    assert expected_speed(settled, acceptance, costs) > 0.96 * best
    if optimum in (0, K):
        assert Counter(settled).most_common(1)[0][0] == optimum
    else:
        assert statistics.mean(settled) == pytest.approx(optimum, rel=0.35)


@pytest.mark.parametrize("rule", BOTH)
def test_useless_draft_costs_less_than_three_percent(rule: type[CostAwareRule]) -> None:
    for text in (equally_good(0.0), overconfident):
        speed = mean_speed(rule(), HALF, text, num_rounds=500)
        assert 0.97 < speed < 1.0, "the draft is abandoned, but not for ever"


def test_calibrated_rule_gains_where_confidence_tells() -> None:
    beta, calibrated = (mean_speed(rule(), THIRD, surely_or_not(0.7), num_rounds=300) for rule in BOTH)
    assert calibrated > 1.04 * beta


# --- adaptation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.9, 0.0)], ids=["better", "worse"])
def test_rule_adapts_when_the_sequence_changes(rule: type[CostAwareRule], before: float, after: float) -> None:
    late: list[int] = []
    for seed in range(4):
        controller = rule(seed=seed).with_costs(THIRD).controller()
        write(controller, THIRD, equally_good(before), num_rounds=300, seed=seed)
        late += write(controller, THIRD, equally_good(after), num_rounds=200, seed=seed + 100).lengths[100:]
    best = expected_speed([best_length(after, THIRD)], after, THIRD)
    assert expected_speed(late, after, THIRD) > 0.94 * best


@pytest.mark.parametrize("rule", BOTH)
def test_warm_start_saves_the_warm_up_of_a_sequence(rule: type[CostAwareRule]) -> None:
    text = equally_good(0.9)
    controller = rule().with_costs(HALF).controller()
    write(controller, HALF, text, num_rounds=200, seed=100)
    warm = controller.adapted_rule()
    assert isinstance(warm, rule)
    cold_speed, warm_speed = (mean_speed(start, HALF, text, num_rounds=25) for start in (rule(), warm))
    assert warm_speed > 1.02 * cold_speed


# --- updates after a round ------------------------------------------------------------------------------------------------


def beta(**settings: object) -> BetaThompsonController:
    return BetaThompson(costs=HALF, **settings).controller()


def calibrated(**settings: object) -> CalibratedThompsonController:
    return CalibratedThompson(costs=CHEAP, **settings).controller()


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


def bin_of(probability: float) -> int:
    return next(index for index, (low, high) in enumerate(BINS) if low <= probability < high)


def test_bins_cover_all_probabilities_without_overlap() -> None:
    assert BINS[0][0] == 0.0
    assert BINS[-1][1] == 1.0
    assert all(low < high == following for (low, high), (following, _) in itertools.pairwise(BINS))
    for index, (low, high) in enumerate(BINS):
        for probability, expected in ((low, index), ((low + high) / 2, index), (high, min(index + 1, len(BINS) - 1))):
            controller = calibrated(forgetting=1.0)
            controller.limit()
            controller.decide(0, Confidence(probability))
            controller.observe(1, 1)
            assert evidence_by_bin(controller) == {expected: (1, 0)}


def evidence_by_bin(controller: CalibratedThompsonController) -> dict[int, tuple[int, int]]:
    """Return (accepted, rejected) beyond the prior, for each bin with evidence."""
    counts = {
        index: (round(known.accepted - prior[0]), round(known.rejected - prior[1]))
        for index, (known, prior) in enumerate(zip(controller.acceptance, AS_CONFIDENT, strict=True))
    }
    return {index: count for index, count in counts.items() if count != (0, 0)}


ADAPTED_BY_ACCEPTED: dict[int, dict[float, tuple[int, int]]] = {
    0: {0.97: (0, 1)},
    1: {0.97: (1, 0), 0.5: (0, 1)},
    2: {0.97: (1, 1), 0.5: (1, 0)},  # the third is in the first one's bin
    3: {0.97: (2, 0), 0.5: (1, 0), 0.2: (0, 1)},
    4: {0.97: (2, 0), 0.5: (1, 0), 0.2: (1, 0)},
}


def test_only_bins_of_accepted_and_first_rejected_tokens_are_updated() -> None:
    for num_accepted, adapted in ADAPTED_BY_ACCEPTED.items():
        controller = calibrated(forgetting=1.0)
        controller.limit()
        for index, probability in enumerate([0.97, 0.5, 0.97, 0.2]):
            controller.decide(index, Confidence(probability))
        controller.observe(4, num_accepted)
        assert evidence_by_bin(controller) == {bin_of(probability): counts for probability, counts in adapted.items()}
        assert controller.overall == BetaPosterior(1.0 + num_accepted, 1.0 + (num_accepted < 4))


def test_gain_is_tokens_beyond_plain_decoding_in_the_same_time() -> None:
    costs = RoundCosts(draft_step=0.5, verify=(1.2, 1.3, 1.4))
    controller = CalibratedThompson(costs=costs, forgetting=1.0).controller()
    controller.observe(2, 1)
    # Two tokens in 1.4 + 2 * 0.5 = 2.4 plain passes, as many as plain steps of 1.2 give; then three.
    assert (controller.gain.rounds, controller.gain.total) == pytest.approx((2.0, 0.0))
    controller.observe(2, 2)
    assert (controller.gain.rounds, controller.gain.total) == pytest.approx((3.0, 1.0))
    controller.observe(0, 0)
    assert (controller.gain.rounds, controller.gain.total) == pytest.approx((3.0, 1.0))


def test_round_without_drafts_fades_the_gain_and_leaves_the_bins() -> None:
    controller = calibrated(forgetting=0.9)
    controller.limit()
    controller.decide(0, Confidence(0.97))
    controller.observe(1, 0)
    before, gain = evidence_by_bin(controller), controller.gain.mean
    for _ in range(500):
        controller.observe(0, 0)
    assert evidence_by_bin(controller) == before != {}
    assert gain < -0.04
    assert controller.gain.mean == pytest.approx(NO_GAIN.mean, abs=1e-6)
    assert controller.gain.rounds == pytest.approx(NO_GAIN.rounds, abs=1e-5)


SURE_OF_ITSELF = tuple(
    (3000.0, 1.0) if low >= 0.9 else (1.0, 1000.0) for low, _ in BINS
)  # right above 0.9, wrong below
WORTH_DRAFTING = GainPrior(mean=9.0, rounds=100.0)


def test_drafting_continues_after_likely_and_stops_after_unlikely_tokens() -> None:
    controller = calibrated(prior=SURE_OF_ITSELF, gain=WORTH_DRAFTING)
    assert controller.limit() == K
    decisions = [controller.decide(index, Confidence(p)) for index, p in enumerate([0.97, 0.92, 0.5])]
    assert decisions == [Decision.CONTINUE, Decision.CONTINUE, Decision.LAST]


def test_earlier_rounds_count_in_the_rate_to_beat() -> None:
    told = tuple((8000.0, 2000.0) for _ in BINS)
    rule = CalibratedThompson(costs=HALF, prior=told, gain=WORTH_DRAFTING, max_tokens=4, forgetting=1.0)
    controller = rule.controller()
    # S_1 a / cost = 0.8 * 0.8 / 0.55 = 1.16; this round has 1.8 / 1.55 = 1.16, plain decoding 1, their mean is 1.08.
    controller.limit()
    assert controller.decide(0, Confidence(0.5)) is Decision.CONTINUE
    for _ in range(50):
        controller.limit()
        controller.observe(4, 4)
    # The rounds before now have 5 tokens in 1.2 + 4 * 0.5 = 3.2 plain passes, 1.56; the mean is 1.36.
    controller.limit()
    assert controller.decide(0, Confidence(0.5)) is Decision.LAST


def test_gain_decides_whether_to_draft_at_all() -> None:
    gain, loss = (calibrated(gain=GainPrior(mean=mean, spread=0.1, rounds=50.0)) for mean in (0.5, -0.5))
    assert {gain.limit() for _ in range(100)} == {K}
    assert {loss.limit() for _ in range(100)} == {0}


@pytest.mark.parametrize("rule", BOTH)
def test_sequences_near_their_end_are_drafted_and_observed(rule: type[CostAwareRule]) -> None:
    for room in (0, 1, 3):
        controller = rule(costs=CHEAP).controller()
        written = write(controller, CHEAP, equally_good(1.0), num_rounds=100, seed=0, room=room)
        assert max(written.lengths) == room
        adapted = controller.adapted_rule()
        assert isinstance(adapted, rule)
        assert (adapted.prior != rule().prior) == (room > 0)


# --- posteriors -----------------------------------------------------------------------------------------------------------


def test_warm_start_keeps_the_proportions_and_little_of_the_evidence() -> None:
    ((accepted, rejected),) = warm_start([BetaPosterior(81.0, 21.0)], [UNIFORM])
    # Of 100 tested tokens, 80 accepted, `WARM_TOKENS` are kept.
    assert (accepted, rejected) == pytest.approx((1.0 + WARM_TOKENS * 0.8, 1.0 + WARM_TOKENS * 0.2))
    assert warm_start([BetaPosterior(3.0, 2.0)], [UNIFORM]) == ((3.0, 2.0),)
    gain = GainPosterior.of(GainPrior(mean=2.0, spread=0.5, rounds=101.0)).warm_start(NO_GAIN)
    assert gain.rounds == pytest.approx(NO_GAIN.rounds + WARM_ROUNDS)
    # A round of 0 and as many of 2 as are kept.
    assert gain.mean == pytest.approx(2.0 * (WARM_ROUNDS + NO_GAIN.rounds * WARM_ROUNDS / 100.0) / (WARM_ROUNDS + 1.0))


# --- adapted rules can be stored ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", BOTH)
def test_adapted_rule_round_trips_through_yaml_and_decides_alike(rule: type[CostAwareRule], tmp_path: Path) -> None:
    controller = rule(persistent=True, costs=THIRD).controller()
    write(controller, THIRD, surely_or_not(0.8), num_rounds=100, seed=0)
    adapted = controller.adapted_rule()
    assert isinstance(adapted, rule)
    (tmp_path / "rule.yaml").write_text(dump(adapted), encoding="utf-8")
    read = validate(
        rule, read_mapping(tmp_path / "rule.yaml", what="rule", error=ProfileError), source="", error=ProfileError
    )
    assert read == adapted == TypeAdapter(AnyRule).validate_python(adapted.model_dump())
    assert (read.costs, read.persistent) == (THIRD, True)
    first, second = (
        write(start.controller(), THIRD, surely_or_not(0.8), num_rounds=50, seed=1) for start in (adapted, read)
    )
    assert first == second


# --- private random streams -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", BOTH)
def test_same_seed_same_decisions_and_another_seed_others(rule: type[CostAwareRule]) -> None:
    def lengths(seed: int) -> list[int]:
        controller = rule(seed=seed, costs=THIRD).controller()
        return write(controller, THIRD, surely_or_not(0.6), num_rounds=100, seed=0).lengths

    assert lengths(1) == lengths(1) != lengths(2)


# --- invalid settings ---------------------------------------------------------------------------------------------------------


IMPOSSIBLE: list[tuple[type[CostAwareRule], dict[str, object], str]] = [
    (BetaThompson, {"prior": (0.0, 1.0)}, "prior.0\n.*greater than 0"),
    (BetaThompson, {"forgetting": 1.1}, "forgetting\n.*less than or equal to 1"),
    (BetaThompson, {"seed": -1}, "seed\n.*greater than or equal to 0"),
    (CalibratedThompson, {"prior": [(1.0, 1.0)] * 9}, r"one pair \(A, B\) for each of the 10 bins, got 9"),
    (CalibratedThompson, {"prior": [(1.0, -1.0)] * 10}, "prior.0.1\n.*greater than 0"),
    (CalibratedThompson, {"gain": {"spread": 0.0}}, "gain.spread\n.*greater than 0"),
    (CalibratedThompson, {"gain": {"width": 1.0}}, "gain.width\n.*not permitted"),
]


def test_impossible_settings_are_refused() -> None:
    for rule, settings, message in IMPOSSIBLE:
        with pytest.raises(ValidationError, match=message):
            rule(**settings)
