"""The plan of a search's time, its budget and its pace: arithmetic in simulated seconds."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.support.benches import ScriptedBench, first_block
from tests.support.records import record, sample
from tuner.config import SearchConfig
from tuner.errors import SearchError
from tuner.progress import Unwatched
from tuner.search.decision import confirm, race_best
from tuner.search.forecast import Forecast
from tuner.search.race import LAP
from tuner.search.time_budget import Pace, TimeBudget, TimedBudget, enough
from tuner.search.time_keeper import TimeKeeper
from tuner.search.time_plan import (
    LEAST_HELD_OUT,
    PlainRate,
    Sizes,
    least_end,
    least_seconds,
    plan_end,
    plan_lines,
    plan_search,
)
from tuner.stage_clock import Stage, StageClock, spoken

SIZES = Sizes(tuning=24, least_tuning=12, held_out=24, per_trial=6, finalists=4, confirmed=1, most_trials=24)
REAL = PlainRate(prefill_seconds=0.5, token_seconds=0.06, new_tokens=64)
"""About a model of 135 M parameters on a CPU thread: 4.3 s for a prompt."""


class Now:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_clock_charges_the_innermost_stage() -> None:
    now = Now()
    clock = StageClock(now)
    with clock.stage(Stage.CHOOSING):
        now.seconds += 1
        with clock.stage(Stage.TRIALS):
            now.seconds += 5
        now.seconds += 2
    now.seconds += 0.5
    assert clock.seconds() == {Stage.CHOOSING: 3, Stage.TRIALS: 5, Stage.OTHER: 0.5}
    assert clock.elapsed == 8.5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.24, "4.2 s"),
        (42.4, "42 s"),
        (187, "3:07 min"),
        (5999, "99:59 min"),
        (7500, "2:05 h"),
        (-26.0, "0.0 s"),
        (-math.inf, "0.0 s"),
        (math.inf, "no limit"),
    ],
)
def test_durations_are_short_words(seconds: float, text: str) -> None:
    assert spoken(seconds) == text


def test_enough_is_more_than_needed_and_round() -> None:
    assert (enough(60), enough(480), enough(1)) == ("70s", "9m", "10s")


@pytest.mark.parametrize("minutes", [6, 8, 12, 20, 60])
def test_planned_stages_fit_into_the_time(minutes: float) -> None:
    plan = plan_search(SIZES, REAL, 60 * minutes, preparing=20)
    assert plan.total <= 60 * minutes
    assert plan.num_trials >= 1
    assert plan.end.held_out >= LEAST_HELD_OUT
    assert plan.tuning >= SIZES.least_tuning


def test_what_fits_is_not_cut() -> None:
    plan = plan_search(SIZES, REAL, 3600, preparing=20)
    assert (plan.tuning, plan.end.held_out, plan.end.raced, plan.end.finalists) == (24, 24, 18, 4)
    unlimited = plan_search(SIZES, REAL, math.inf, preparing=20)
    assert unlimited.num_trials == 24
    assert unlimited.end == plan.end


def test_more_time_never_means_fewer_prompts() -> None:
    plans = [plan_search(SIZES, REAL, 60 * minutes, preparing=20) for minutes in range(5, 40)]
    held_out = [plan.end.held_out for plan in plans]
    assert held_out == sorted(held_out)
    assert [plan.tuning for plan in plans] == sorted(plan.tuning for plan in plans)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    some.builds(PlainRate, some.floats(0.01, 5), some.floats(0.005, 1), some.integers(8, 512)),
    some.integers(2, 40),
    some.integers(2, 40),
    some.integers(1, 6),
    some.integers(1, 3),
    some.integers(0, 6),
    some.integers(0, 5),
    some.floats(0, 300),
    some.tuples(some.floats(1, 60), some.floats(1, 1.5)),
)
def test_more_time_never_means_less_of_anything(
    rate: PlainRate,
    tuning: int,
    held_out: int,
    finalists: int,
    confirmed: int,
    stock: int,
    heat: int,
    preparing: float,
    times: tuple[float, float],
) -> None:
    per_trial = min(6, tuning)
    sizes = Sizes(
        tuning=tuning,
        least_tuning=min(tuning, per_trial + LAP),
        held_out=held_out,
        per_trial=per_trial,
        finalists=finalists,
        confirmed=confirmed,
        most_trials=24,
        stock=min(stock, held_out),
        heat=heat,
        start_seconds=2.0,
    )
    shorter = least_seconds(sizes, rate, preparing) * times[0]
    less, more = (plan_search(sizes, rate, left, preparing) for left in (shorter, shorter * times[1]))
    assert less.total <= shorter * (1 + 1e-9)
    assert less.num_trials <= more.num_trials
    assert less.tuning <= more.tuning
    for part in ("confirmed", "held_out", "finalists", "race_seconds", "stock"):
        assert getattr(less.end, part) <= getattr(more.end, part), part


def test_the_first_comparison_with_stock_generation_costs_no_trial() -> None:
    with_stock = dataclasses.replace(SIZES, stock=6)
    plans = [plan_search(with_stock, REAL, seconds, preparing=20) for seconds in range(360, 1500, 5)]
    first = next(index for index, plan in enumerate(plans) if plan.end.stock)
    assert 0 < first < len(plans) - 1
    assert plans[first - 1].num_trials <= plans[first].num_trials
    assert plans[first - 1].end.held_out <= plans[first].end.held_out


def test_the_shortest_search_is_one_trial_and_the_least_end() -> None:
    needed = least_seconds(SIZES, REAL, 20)
    plan = plan_search(SIZES, REAL, needed, preparing=20)
    assert plan.num_trials == 1
    assert plan.total == pytest.approx(needed)
    assert dataclasses.replace(plan.end, saved=0.0) == least_end(SIZES, REAL)
    assert plan.end.saved == pytest.approx(0.0)


def test_a_faster_draft_leaves_time_for_more_prompts() -> None:
    slow, fast = (plan_end(SIZES, REAL, 240, speed=speed) for speed in (0.5, 2.0))
    assert slow.held_out < fast.held_out
    assert max(slow.seconds, fast.seconds) <= 240


def test_every_stage_is_a_line_of_the_plan() -> None:
    lines = list(plan_lines(plan_search(SIZES, REAL, 480, 20), SIZES))
    assert len(lines) == 7
    assert any("of 24 held-out prompts" in line for line in lines)


def test_time_on_top_does_not_count() -> None:
    now = Now()
    budget = TimeBudget(480.0, StageClock(now), spent_before=100.0)
    now.seconds = 200.0
    budget.on_top = 150.0
    assert (budget.spent, budget.left) == (150.0, 330.0)
    budget.check(330.0, "a trial")
    with pytest.raises(SearchError, match="1:40 min of --timeout 8:00 min were spent by earlier runs"):
        budget.check(331.0, "a trial")
    assert TimeBudget(None, StageClock(now)).left == math.inf


def _budget(now: Now, *, left: float, least: float, has_result: bool) -> TimedBudget:
    return TimedBudget(
        None,
        None,
        left=lambda: left - now(),
        least_left=lambda: least - now(),
        has_result=lambda: has_result,
        trial_seconds=30.0,
    )


def test_a_trial_begins_only_if_it_is_likely_to_end_in_time() -> None:
    now = Now()
    budget = _budget(now, left=100.0, least=300.0, has_result=True)
    assert budget.exhausted(0) is None
    budget.spend(record(seconds=80.0))
    now.seconds = 25.0
    assert budget.exhausted(1) == "its share of the search time is spent"
    budget.spend(record(seconds=10.0, repeat_of=0))
    assert budget.exhausted(2) is not None, "a repeat says nothing of how long a trial takes"


def test_the_first_trial_may_use_what_race_and_confirmation_can_do_without() -> None:
    now = Now()
    assert _budget(now, left=-50.0, least=60.0, has_result=True).exhausted(0) is not None
    assert _budget(now, left=-50.0, least=60.0, has_result=False).exhausted(0) is None
    assert _budget(now, left=-50.0, least=20.0, has_result=False).exhausted(0) is not None


def test_a_trial_that_goes_on_for_too_long_is_cut() -> None:
    now = Now()
    budget = _budget(now, left=40.0, least=40.0, has_result=True)
    now.seconds = 50.0
    assert budget.overdue() is None
    now.seconds = 60.0
    assert budget.overdue() == "cut, as the search time is spent"


def test_a_pace_lets_a_step_begin_while_the_longest_fits() -> None:
    now = Now()
    pace = Pace(lambda: 100.0 - now())
    answers = []
    for step in (10, 30, 25, 20, 5):
        answers.append(pace())
        now.seconds += step
    assert answers == [True, True, True, True, False]
    assert Pace(lambda: -1.0)(), "the first step always begins"


def _bench(now: Now, seconds: float, num_prompts: int) -> ScriptedBench:
    """Each sample takes `seconds`."""

    def answer(wanted: object, index: int) -> object:
        now.seconds += seconds
        return sample(1.2 + (index + first_block(wanted)) % 2 / 10, index)  # type: ignore[arg-type]

    return ScriptedBench(answer, num_prompts)  # type: ignore[arg-type]


def test_a_race_out_of_time_ends_with_all_finalists_on_the_same_prompts() -> None:
    now = Now()
    trials = [record(1.5, blocks=(block,), number=block) for block in (1, 2)]
    config = SearchConfig(model="m", dataset="d", prompts_per_trial=2, finalists=2)
    pace = Pace(lambda: 50.0 - now())
    finalists = race_best(trials, ["conf_layers"], _bench(now, 2.0, 26), config, Unwatched(), may_go_on=pace)
    assert [len(each.measurement.samples) for each in finalists] == [12, 12]
    assert now.seconds <= 50.0


def test_a_confirmation_out_of_time_measures_fewer_prompts_but_enough() -> None:
    now = Now()
    trials = [record(1.5, blocks=(1,)), record(1.4, blocks=(2,), study="exit_layer")]
    config = SearchConfig(model="m", dataset="d", prompts_per_trial=2, finalists=2)
    finalists = race_best(trials, ["conf_layers", "exit_layer"], _bench(now, 0.0, 8), config, Unwatched())
    now.seconds = 0.0

    def share(num_left: int) -> Pace | None:
        left = 30.0 - now()
        until = left - left / num_left
        return Pace(lambda: 30.0 - now() - until) if left > 6.0 else None

    counts = [
        len(each.measurement.samples)
        for each in confirm(finalists, trials, _bench(now, 1.0, 24), Unwatched(), share, least=6)
    ]
    assert counts[0] == 15
    assert counts[1] == 15
    now.seconds = 28.0
    (only,) = confirm(finalists, trials, _bench(now, 1.0, 24), Unwatched(), share, least=6)
    assert len(only.measurement.samples) == 6, "the winner is always measured, on the least number of prompts"


def test_stock_generation_is_planned_within_the_time() -> None:
    with_stock = dataclasses.replace(SIZES, stock=6)
    plans = {minutes: plan_search(with_stock, REAL, 60 * minutes, preparing=20) for minutes in (6, 8, 14, 20, 60)}
    assert [plan.end.stock for plan in plans.values()] == [0, 0, 3, 5, 6]
    for minutes, plan in plans.items():
        assert plan.total <= 60 * minutes
        assert plan.seconds[Stage.STOCK] == plan.end.stock_seconds
        assert plan.end.held_out >= LEAST_HELD_OUT


def test_results_are_planned_to_take_as_long_as_opening_the_stores() -> None:
    config = SearchConfig(model="m", dataset="d")
    quick, slow = (least_end(Sizes.of(config, opening_seconds=seconds), REAL) for seconds in (0.5, 30.0))
    assert (quick.writing_seconds, slow.writing_seconds) == (6.0, 30.0)


def test_texts_that_must_be_decoded_again_are_planned() -> None:
    known, unknown = (least_end(dataclasses.replace(SIZES, texts=texts), REAL) for texts in (0, 3))
    assert unknown.writing_seconds - known.writing_seconds == pytest.approx(3 * REAL.sample)


def test_the_heat_of_an_engine_is_planned_with_its_servers() -> None:
    in_engine = dataclasses.replace(SIZES, heat=5, start_seconds=2.0)
    here, there = least_end(SIZES, REAL), least_end(in_engine, REAL)
    assert there.race_seconds - here.race_seconds == pytest.approx(6 * 2.0 + 5 * REAL.measured(2))
    assert there.held_out_seconds == here.held_out_seconds
    plan = plan_search(in_engine, REAL, 480, preparing=20)
    assert plan.total <= 480
    (race_line,) = [line for line in plan_lines(plan, in_engine) if line.startswith("race")]
    assert "a heat of 5 candidates or more" in race_line


def test_a_heat_leaves_time_for_the_lap_that_is_always_run() -> None:
    now = Now()
    task: Any = SimpleNamespace(config=SimpleNamespace(batch_size=1), budget=TimeBudget(300, StageClock(now)))
    sizes = dataclasses.replace(SIZES, heat=5, start_seconds=2.0)
    keeper = TimeKeeper(task, Forecast(sizes, REAL, preparing=20, distillation=None))
    end = keeper.plan_race([record(speedup=4.0)], num_confirmed=1)
    assert end == plan_end(sizes, REAL, 300), "what a trial here was rated at says little of the engine"
    may_go_on = keeper.heat_pace(end)
    while may_go_on():
        now.seconds += 10.0
    assert 300 - now.seconds - end.after_race >= end.lap_seconds > 0
    assert 300 - now.seconds - end.after_race < end.lap_seconds + 10.0
