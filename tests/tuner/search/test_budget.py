"""The sizes of race, confirmation and comparison that fit in the time left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tuner.search.budget import FEWEST_TRIED, HOPED, LEAST_HELD_OUT, WARMED, Budget, End, Seconds
from tuner.stage_clock import StageClock

PLAIN = Seconds(first=4.0, again=2.0, beginning=4.0)
END = End(finalists=4, raced=8, confirmed=1, held_out=28, stock=6, beside=6.0)


def test_all_is_done_where_time_allows() -> None:
    assert END.fitted(PLAIN, END.seconds(PLAIN)) == END


def test_the_costliest_part_is_cut_first_and_nothing_below_the_least() -> None:
    fitted = END.fitted(PLAIN, END.seconds(PLAIN) - 1.0)
    assert fitted == End(finalists=4, raced=8, confirmed=1, held_out=27, stock=6, beside=6.0)
    shortest = End(2, 4, 1, LEAST_HELD_OUT, 0, 6.0)
    assert END.fitted(PLAIN, 0.0) == shortest
    assert END.least == replace(shortest, finalists=1, paired=HOPED), "one needs no race"
    heat = replace(END, heat=40.0)
    assert heat.seconds(PLAIN) == END.seconds(PLAIN) + 40.0
    assert heat.fitted(PLAIN, END.seconds(PLAIN) + 39.0) == replace(fitted, heat=40.0)


def test_a_race_of_two_is_given_up_last() -> None:
    end = End(2, 4, 1, LEAST_HELD_OUT, 0, 6.0)
    for timeout, finalists in ((end.seconds(PLAIN) + 9.0, 2), (end.seconds(PLAIN) - 1.0, 1)):
        assert Budget(timeout, StageClock(), plain=PLAIN, end=END).fitted() == replace(end, finalists=finalists)
    race = end.seconds(PLAIN) - replace(end, finalists=1).seconds(PLAIN)
    assert race == pytest.approx(3 * 4 * WARMED * PLAIN.again), "plain decoding races too, and one candidate does not"


def test_what_the_comparison_leaves_goes_to_the_held_out_prompts() -> None:
    without = End(confirmed=1, held_out=28, beside=6.0)
    seconds = 120.0
    fitted = End(confirmed=1, held_out=28, stock=6, beside=6.0).fitted(PLAIN, seconds)
    assert fitted == without.fitted(PLAIN, seconds)
    assert seconds * 0.9 < fitted.seconds(PLAIN) <= seconds


def test_a_trial_gets_fewer_prompts_where_one_would_take_most_of_the_time() -> None:
    def tuned(timeout: float) -> tuple[int, int]:
        budget = Budget(timeout, StageClock(), plain=PLAIN, end=END, of_trial=6)
        return budget.tuning_samples(24), budget.of_trial

    assert tuned(1e4) == (24, 6)
    assert tuned(160.0) == (6, 5), "one prompt beside those of a trial, as one may be too short"
    assert tuned(1.0) == (FEWEST_TRIED + 1, FEWEST_TRIED)
