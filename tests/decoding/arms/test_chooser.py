"""The choice of arms by simulated seconds: near the best fixed arm in each phase, and never below plain rounds."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest

from decoding.arms.belief import Prior
from decoding.arms.chooser import BEYOND, CONTROL_PERIOD, ArmChooser, Promise, combined, load_of, prior
from decoding.arms.windows import OpenWindow
from decoding.rounds import Round

Speeds = Mapping[int, tuple[float, float]]
"""Seconds of a pass in which each sequence ends a round, and tokens of a round, by arm; plain rounds have 1 and 1."""
DELAY = 0.25
"""Share of a phase after which the best arm must have been found."""
PASSES = 3000
PASSES_OF_NOISE = 9
"""Passes that are slow or fast together."""
TUNED = Promise(1.7, 1.6, 1.8)


@dataclass
class Phase:
    """Tokens per second over plain rounds: in the whole phase, after the delay, and of the best fixed arm."""

    whole: float
    late: float
    best: float
    use: Mapping[int, float]
    num_changes: int


def _simulate(
    phases: Sequence[tuple[int, Speeds]],
    promises: Sequence[Promise | None],
    *,
    noise: float,
    seed: int,
    num_passes: int = PASSES,
) -> tuple[list[Phase], ArmChooser]:
    chooser, chance = ArmChooser(promises, seed=seed), random.Random(seed)
    window, slowness, found = OpenWindow(chooser.arm), 1.0, []
    for num_running, speeds in phases:
        arms: Speeds = {0: (1.0, 1.0), **speeds}
        tokens, seconds, of_plain, used = [0, 0], [0.0, 0.0], [0.0, 0.0], []
        for number in range(num_passes):
            if number % PASSES_OF_NOISE == 0:
                slowness = math.exp(chance.gauss(0.0, noise))
            if window.is_empty or not window.fits(num_running):
                begun = chooser.begin(num_running)
                window = window if window.is_empty and begun == window.arm else OpenWindow(begun)
            arm, is_late = window.arm, number >= DELAY * num_passes
            took, gained = arms[arm]
            lengths = [int(gained) + (chance.random() < gained % 1) for _ in range(num_running)]
            used.append(arm)
            tokens[is_late] += sum(lengths)
            seconds[is_late] += took * slowness
            of_plain[is_late] += slowness / num_running
            rounds = [Round((1,) * length, arm, length - 1, 0.0, 0.0) for length in lengths]
            full = window.add(num_running, rounds, took * slowness)
            window = window if full is None else OpenWindow.after(chooser.learn(full), full.arm)
        found.append(
            Phase(
                sum(tokens) / sum(seconds) * sum(of_plain) / num_passes,
                tokens[1] / seconds[1] * of_plain[1] / (num_passes * (1 - DELAY)),
                max(gained / took for took, gained in arms.values()),
                {arm: used.count(arm) / num_passes for arm in arms},
                sum(before != after for before, after in pairwise(used)),
            )
        )
    return found, chooser


CODE, PROSE = {1: (1.5, 2.6)}, {1: (1.5, 1.2)}
LONG_ON_CODE, SHORT_ON_CODE = (1.5, 2.6), (1.1, 1.3)
LONG_ON_PROSE, SHORT_ON_PROSE = (1.5, 1.2), (1.1, 1.35)
SCRIPTS: dict[str, tuple[list[tuple[int, Speeds]], list[Promise | None]]] = {
    "text changes": ([(1, PROSE), (1, CODE), (1, PROSE)], [TUNED]),
    "load changes": ([(1, CODE), (8, {1: (3.0, 2.6)}), (1, CODE)], [TUNED]),
    "drafts never pay": ([(1, PROSE), (8, PROSE)], [TUNED]),
    "two profiles": (
        [
            (1, {1: LONG_ON_PROSE, 2: SHORT_ON_PROSE}),
            (1, {1: LONG_ON_CODE, 2: SHORT_ON_CODE}),
            (8, {1: (3.0, 2.6), 2: (1.5, 1.8)}),
        ],
        [TUNED, Promise(1.2, 1.1, 1.3)],
    ),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_phase_is_near_its_best_arm_and_never_below_plain(script: str) -> None:
    phases, promises = SCRIPTS[script]
    for seed in range(2):
        for phase in _simulate(phases, promises, noise=0.05, seed=seed)[0]:
            assert phase.late > 0.95 * phase.best
            assert phase.whole > 0.97


@pytest.mark.parametrize("script", ["text changes", "load changes"])
def test_noisy_windows_do_not_keep_a_wrong_arm(script: str) -> None:
    phases, promises = SCRIPTS[script]
    for seed in range(2):
        for phase in _simulate(phases, promises, noise=0.2, seed=seed)[0]:
            assert phase.late > 0.94 * phase.best


def test_a_false_first_belief_is_given_up() -> None:
    wrong = [Promise(3.0, 2.9, 3.1), Promise(0.8, 0.7, 0.9)]
    (phase,), _ = _simulate([(1, {1: (1.5, 1.2), 2: (1.0, 1.5)})], wrong, noise=0.05, seed=0)
    assert phase.late > 0.95 * phase.best


def test_plain_rounds_are_a_control_of_one_or_two_in_a_hundred_and_equal_arms_change_seldom() -> None:
    (code,), _ = _simulate([(1, CODE)], [TUNED], noise=0.02, seed=0)
    assert 0.01 < code.use[0] < 0.02 + 8 / PASSES * 8  # and some more at the start
    (equal,), _ = _simulate([(1, {1: (1.0, 1.0)})], [None], noise=0.05, seed=0)
    assert equal.num_changes < PASSES / 8 / 2


@pytest.mark.parametrize(("num_tuned", "at_eight"), [(1, 0), (8, 1)])
def test_rounds_begin_plain_beyond_the_load_that_was_tuned_for(num_tuned: int, at_eight: int) -> None:
    chooser = ArmChooser([Promise(1.7, 1.6, 1.8, num_tuned)])
    assert chooser.arm == 1
    assert chooser.begin(8) == at_eight
    assert [load_of(number) for number in (1, 2, 3.4, 4, 7.6, 15)] == [1, 2, 2, 3, 4, 4]


@pytest.mark.parametrize("promise", [TUNED, None])
def test_a_load_without_windows_follows_its_neighbours(promise: Promise | None) -> None:
    never: Speeds = {1: (3.0, 1.5)}
    _, chooser = _simulate([(1, CODE), (8, never)], [promise], noise=0.02, seed=0)
    assert chooser.begin(1) == 1, "measured there"
    assert chooser.begin(5) == 0, "nearer to eight sequences, where drafts halve the speed"
    assert chooser.begin(40) == 0
    _, chooser = _simulate([(1, CODE), (8, {1: (1.5, 2.6)})], [promise], noise=0.02, seed=0)
    assert chooser.begin(5) == 1, "drafts pay on both sides"
    assert chooser.begin(16) == 1


def test_the_costs_of_rounds_carry_a_figure_to_another_load() -> None:
    costs = {1: 1.5, 2: 1.8, 4: 3.0}
    assert prior(TUNED, 4, costs).mean == pytest.approx(math.log(1.7 * 1.5 / 3.0))
    assert prior(TUNED, 4, costs).sd > prior(TUNED, 1, costs).sd
    assert prior(TUNED, 1, costs) == prior(TUNED, 1)
    assert prior(TUNED, 3, costs) == BEYOND, "not measured there"
    assert prior(Promise(1.7, 1.6, 1.8, 8), 2, costs | {4: 1.8}) == prior(
        Promise(1.7, 1.6, 1.8, 8), 2, {4: 1.0, 2: 1.0}
    )
    assert prior(None, 4, costs).mean < prior(None, 1, costs).mean
    chooser = ArmChooser([TUNED])
    chooser.expect([dict.fromkeys(range(1, 5), 1.5)])
    assert (chooser.arm, chooser.begin(8)) == (1, 1), "a round costs no more with eight sequences"
    chooser.expect([{1: 1.5, 4: 3.0}])
    assert (chooser.begin(8), chooser.begin(1)) == (0, 1)


@pytest.mark.parametrize("cost", [6.0, 9.0])
def test_drafts_that_seem_slower_cost_plain_rounds_little_from_the_first_window_on(cost: float) -> None:
    speeds: Speeds = {1: (cost, 2.0), 2: (cost, 1.5)}
    for seed in range(4):
        (phase,), _ = _simulate([(8, speeds)], [TUNED, None], noise=0.05, seed=seed, num_passes=1000)
        assert phase.whole > 0.97


def test_a_profile_without_figures_is_tried_for_one_sequence_first() -> None:
    chooser = ArmChooser([None])
    assert chooser.arm == 1
    assert chooser.begin(4) == 0


def test_sources_count_by_their_precision() -> None:
    together = combined([Prior(0.0, 0.1), Prior(1.0, 0.2)])
    assert together.mean == pytest.approx(0.2)
    assert together.sd == pytest.approx(0.1 * 0.8**0.5)


def test_alarm_is_raised_below_the_interval_of_every_profile_and_cleared_above_it() -> None:
    slow, fast = {1: (1.5, 1.9)}, {1: (1.5, 2.6)}  # 1.27 and 1.73
    states = []
    for script in ([fast], [fast, slow], [fast, slow, fast]):
        _, chooser = _simulate([(1, each) for each in script], [TUNED], noise=0.02, seed=1)
        states.append(chooser.is_below_promise)
    assert states == [False, True, False]
    both = [TUNED, Promise(1.2, 1.15, 1.3)]
    _, chooser = _simulate([(1, {1: (1.5, 1.9), 2: (1.0, 1.2)})], both, noise=0.02, seed=1)
    assert not chooser.is_below_promise, "the second profile keeps its promise"


def test_the_alarm_looks_at_the_load_that_was_tuned_for_only() -> None:
    _, chooser = _simulate([(8, {1: (3.0, 2.6)})], [TUNED], noise=0.02, seed=0)
    assert not chooser.is_below_promise
    _, chooser = _simulate([(8, {1: (3.0, 2.6)})], [None], noise=0.02, seed=0)
    assert not chooser.is_below_promise


def test_speedups_are_those_of_the_phase() -> None:
    _, chooser = _simulate([(1, {1: LONG_ON_CODE, 2: SHORT_ON_CODE})], [TUNED, None], noise=0.02, seed=0)
    assert chooser.speedups()[0] == pytest.approx(2.6 / 1.5, rel=0.1)
    assert chooser.speedups()[1] == pytest.approx(1.3 / 1.1, rel=0.3)
    assert CONTROL_PERIOD == 64
