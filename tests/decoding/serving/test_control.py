"""When a server drafts, by simulated seconds: near the better of drafting and plain rounds, at the price of few controls."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from decoding.rounds import Round
from decoding.serving.control import (
    CONTROL_ROUNDS,
    FEWEST_RATIOS,
    FIRST_ROUNDS,
    KEPT_RATIOS,
    DraftControl,
    load_name,
    load_of,
    median_interval,
)

Speed = tuple[float, float]
"""Seconds of a drafting round in plain passes, and its tokens."""
FAST, SLOW, SLOWER = (1.5, 2.6), (1.5, 1.2), (3.0, 1.5)
PASSES = 12_000


def _decode(
    control: DraftControl, num_running: int, speed: Speed, *, noise: float = 0.05, seed: int = 0, passes: int = PASSES
) -> tuple[float, float, float]:
    """Decode for some passes, each of which ends a round of every sequence.

    Returns speed over plain decoding, in all and in the last half, and the share of plain rounds.
    """
    chance, slowness = random.Random(seed), 1.0
    tokens, plain_seconds, seconds, num_plain = [0, 0], [0.0, 0.0], [0.0, 0.0], 0
    for number in range(passes):
        half = 2 * number // passes
        if number % 9 == 0:
            slowness = math.exp(chance.gauss(0.0, noise))
        control.choose(num_running)
        took, gained = speed if control.drafts else (1.0, 1.0)
        lengths = [int(gained) + (chance.random() < gained % 1) for _ in range(num_running)]
        rounds = [Round((1,) * length, int(gained > 1), length - 1, 0.0, 0.0) for length in lengths]
        num_plain += not control.drafts
        control.observe(num_running, rounds, took * slowness)
        tokens[half] += sum(lengths)
        seconds[half] += took * slowness
        plain_seconds[half] += slowness * sum(lengths) / num_running
    ratios = [expected / spent for expected, spent in zip(plain_seconds, seconds, strict=True)]
    return sum(plain_seconds) / sum(seconds), ratios[1], num_plain / passes


@pytest.mark.parametrize(("num_running", "speed"), [(1, FAST), (3, SLOW), (8, SLOWER), (1, (1.0, 1.1))])
def test_speed_is_near_the_better_one_and_never_far_below_plain(num_running: int, speed: Speed) -> None:
    best = max(speed[1] / speed[0], 1.0)
    for seed in range(2):
        whole, late, _ = _decode(DraftControl(), num_running, speed, seed=seed)
        assert late > 0.97 * best
        assert whole > 0.97


def test_no_more_than_one_round_in_64_is_plain_while_drafts_pay() -> None:
    num_running = 16
    control = DraftControl()
    first = FEWEST_RATIOS * (FIRST_ROUNDS + CONTROL_ROUNDS + 2)
    _decode(control, num_running, FAST, passes=first)
    *_, plain = _decode(control, num_running, FAST, passes=64 * 9 * 20)
    assert 0.01 < plain <= 1 / 64 + 1e-3


def test_rechecks_with_drafts_cost_no_more_than_controls() -> None:
    control = DraftControl()
    for seed in range(2):
        _, late, plain = _decode(control, 4, (3.0, 1.2), noise=0.0, seed=seed)
    assert plain > 0.98
    assert late > 1 - 1 / 60


def test_a_change_of_the_text_is_followed_in_both_directions() -> None:
    control = DraftControl()
    for seed, speed in enumerate([FAST, SLOW, FAST, SLOW]):
        _, late, _ = _decode(control, 4, speed, seed=seed, passes=2 * PASSES)
        assert late > 0.96 * max(speed[1] / speed[0], 1.0)


def test_each_load_is_measured_and_an_unknown_one_begins_like_the_one_below() -> None:
    control = DraftControl()
    _decode(control, 1, FAST)
    _decode(control, 4, SLOW)
    control.choose(5)
    assert not control.drafts
    control.choose(8)
    assert not control.drafts, "unknown, and drafts do not pay for four"
    control.choose(2)
    assert control.drafts, "unknown, and drafts pay for one"
    assert set(control.speedups) == {1, 4}
    assert control.speedups[1].ci95[0] > 1.5
    assert control.speedups[4].ci95[1] < 0.9
    _decode(control, 9, FAST)
    control.choose(8)
    assert control.drafts


def test_speeds_are_compared_at_the_same_number_of_sequences() -> None:
    """Twice as many sequences of one load take nearly twice as long; drafts neither gain nor lose."""
    control, chance = DraftControl(), random.Random(1)
    for _ in range(900):
        num_running = chance.choice([8, 15])
        for _ in range(chance.randrange(4, 40)):
            control.choose(num_running)
            length = 2 if control.drafts else 1
            rounds = [Round((1,) * length, length - 1, length - 1, 0.0, 0.0)] * num_running
            control.observe(num_running, rounds, num_running * length / 8)
    assert control.speedups[8].ci95 == pytest.approx((1.0, 1.0), abs=0.02)


def test_rounds_that_began_before_a_change_are_left_out() -> None:
    """A drafting round of each sequence ends among the plain ones of a control; its tokens would count for plain rounds."""
    control, num_running = DraftControl(), 4
    drafted = [False] * num_running  # by sequence: how the round began that ends in this pass
    for _ in range(PASSES):
        control.choose(num_running)
        rounds = [Round((1, 1) if each else (1,), int(each), int(each), 0.0, 0.0) for each in drafted]
        drafted = [control.drafts] * num_running
        control.observe(num_running, rounds, 1.0)
    assert control.speedups[4].ci95 == pytest.approx((2.0, 2.0), abs=0.06)


def test_the_interval_covers_the_median_in_95_of_100() -> None:
    """By the binomial distribution: of signs, all of which are equally likely."""
    for num_values in range(6, 40):
        interval = median_interval([float(value) for value in range(num_values)])
        assert interval is not None
        low, high = (int(end) for end in interval.ci95)
        assert low + high == num_values - 1
        coverage = [
            1 - 2 * sum(math.comb(num_values, count) for count in range(below)) / 2**num_values
            for below in (low + 1, low + 2)
        ]
        assert coverage[0] >= 0.95 > coverage[1]
    assert [median_interval(values) for values in ([], [1.0], [0.9] * 5)] == [None] * 3, "too few ratios"


def test_one_outlier_of_twelve_moves_nothing() -> None:
    ratios = [0.9, 0.91, 0.92] * 4
    assert len(ratios) == KEPT_RATIOS
    for outlier in (0.01, 100.0):
        interval = median_interval([outlier, *ratios[1:]])
        assert interval is not None
        assert 0.9 <= interval.ci95[0] <= interval.ci95[1] <= 0.92


def test_loads_are_powers_of_two() -> None:
    assert [load_of(number) for number in range(1, 9)] == [1, 2, 2, 4, 4, 4, 4, 8]
    assert [load_name(load) for load in (1, 2, 4, 8)] == ["1", "2-3", "4-7", "8-15"]


def test_seconds_of_another_load_than_the_chosen_one_are_left_out() -> None:
    """While prompts of a larger load are read, the choice is for that load already."""
    control = DraftControl()
    for number in itertools.islice(itertools.cycle([1, 2, 3]), 3000):
        control.choose(8)
        control.observe(number, [Round((1,), 0, 0, 0.0, 0.0)] * number, 1.0)
    assert not control.speedups
