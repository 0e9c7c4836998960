"""Windows of rounds: what is counted, and when they end."""

from __future__ import annotations

from decoding.arms.windows import ROUNDS_PER_WINDOW, OpenWindow, TimedWindow
from decoding.rounds import Round


def _round(num_accepted: int) -> Round:
    return Round((0,) * (num_accepted + 1), 3, num_accepted, 0.0, 0.0)


def test_window_leaves_out_the_first_round_of_each_sequence() -> None:
    window, full = OpenWindow(1), None
    assert window.add(2, [_round(3), _round(3)], 100.0, context=1) is None
    for number in range(ROUNDS_PER_WINDOW):
        assert full is None
        full = window.add(2, [_round(number % 2), _round(0)], 0.5, context=100 + number)
    assert full == TimedWindow(1, 2.0, 16, 20, 4.0, 48, (12, 4), context=103.5)
    assert full.tokens_per_second == 5.0


def test_a_window_with_more_sequences_needs_more_rounds_and_does_not_fit_another_load() -> None:
    window, num_passes, full = OpenWindow(0), 0, None
    while full is None:
        num_running = 3 + num_passes % 2
        full = window.add(num_running, [_round(0)], 1.0)
        num_passes += 1
    assert num_passes > 3 * ROUNDS_PER_WINDOW
    assert 3.4 < full.num_running < 3.6
    assert [window.fits(number) for number in (1, 2, 6, 7)] == [False, True, True, False]
    assert OpenWindow(0).fits(1000)
