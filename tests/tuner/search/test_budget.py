"""The sizes of race, confirmation and comparison that fit in the time left."""

from __future__ import annotations

from dataclasses import replace

from tuner.search.budget import LEAST_HELD_OUT, End, Seconds

PLAIN = Seconds(first=4.0, again=2.0, beginning=4.0)
END = End(finalists=4, raced=8, confirmed=1, held_out=28, stock=6, beside=6.0)


def test_all_is_done_where_time_allows() -> None:
    assert END.fitted(PLAIN, END.seconds(PLAIN)) == END


def test_the_costliest_part_is_cut_first_and_nothing_below_the_least() -> None:
    fitted = END.fitted(PLAIN, END.seconds(PLAIN) - 1.0)
    assert fitted == End(finalists=4, raced=8, confirmed=1, held_out=24, stock=6, beside=6.0)
    assert END.fitted(PLAIN, 0.0) == END.least == End(2, 4, 1, LEAST_HELD_OUT, 0, 6.0)
    heat = replace(END, heat=40.0)
    assert heat.seconds(PLAIN) == END.seconds(PLAIN) + 40.0
    assert heat.fitted(PLAIN, END.seconds(PLAIN) + 39.0) == replace(fitted, heat=40.0)


def test_what_the_comparison_leaves_goes_to_the_held_out_prompts() -> None:
    without = End(confirmed=1, held_out=28, beside=6.0)
    seconds = 120.0
    fitted = End(confirmed=1, held_out=28, stock=6, beside=6.0).fitted(PLAIN, seconds)
    assert fitted == without.fitted(PLAIN, seconds)
    assert seconds * 0.7 < fitted.seconds(PLAIN) <= seconds
