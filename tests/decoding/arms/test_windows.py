"""Windows of rounds: what is counted, and when they end."""

from __future__ import annotations

import pytest

from decoding.arms.belief import PLAIN
from decoding.arms.windows import FEWEST_ROUNDS, FEWEST_ROUNDS_IN_ALL, FEWEST_TOKENS, OpenWindow, TimedWindow
from decoding.rounds import Round


def _round(num_accepted: int) -> Round:
    return Round((0,) * (num_accepted + 1), 3, num_accepted, 0.0, 0.0)


def test_window_leaves_out_rounds_that_may_have_begun_before_it() -> None:
    window, full = OpenWindow(1), None
    assert window.add(2, [_round(3), _round(3)], 100.0) is None
    for number in range(7):
        assert full is None
        full = window.add(2, [_round(number % 2), _round(0)], 0.5)
    assert full == TimedWindow(1, 2.0, 14, 17, 3.5, 42, (11, 3))
    assert full.tokens_per_second == 17 / 3.5


@pytest.mark.parametrize(("num_running", "num_accepted", "num_passes"), [(1, 0, 8), (1, 3, 8), (8, 0, 8), (8, 3, 4)])
def test_a_window_ends_after_enough_tokens_and_rounds(num_running: int, num_accepted: int, num_passes: int) -> None:
    window = OpenWindow.after(1, 1)
    for number in range(1, num_passes + 1):
        full = window.add(num_running, [_round(num_accepted)] * num_running, 1.0)
        assert (full is None) is (number < num_passes)
    assert window.tokens_per_sequence >= FEWEST_TOKENS
    assert window.rounds_per_sequence >= FEWEST_ROUNDS
    assert len(window.rounds) >= FEWEST_ROUNDS_IN_ALL


def test_drafts_after_plain_rounds_are_a_trial_that_ends_early_and_begins_cleanly() -> None:
    trial = OpenWindow.after(1, PLAIN)
    assert trial.add(8, [_round(1)] * 8, 1.0) is None
    assert trial.add(8, [_round(1)] * 8, 1.0) == TimedWindow(1, 8.0, 16, 32, 2.0, 48, (0, 16))
    assert not OpenWindow.after(1, 1).is_trial
    assert not OpenWindow.after(PLAIN, 1).is_trial
    assert OpenWindow.after(2, 1).may_begin_before
    assert OpenWindow.after(PLAIN, 1).may_begin_before


def test_a_window_does_not_fit_another_load() -> None:
    window, num_passes, full = OpenWindow(0), 0, None
    assert window.is_empty
    while full is None:
        num_running = 3 + num_passes % 2
        full = window.add(num_running, [_round(0)], 1.0)
        num_passes += 1
        assert not window.is_empty
    assert num_passes > 3 * FEWEST_TOKENS
    assert 3.4 < full.num_running < 3.6
    assert [window.fits(number) for number in (1, 2, 6, 7)] == [False, True, True, False]
    assert OpenWindow(0).fits(1000)
