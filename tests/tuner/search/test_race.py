"""The race of the finalists."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from studies.contract import Candidate
from studies.measurement import PromptSample
from tests.support.benches import Answer, ScriptedBench, first_block
from tests.support.records import record, sample
from tuner.search.race import MOST_PASSES, race

Speed = Callable[[int], float]
"""Speed-up by first skipped block."""


def steady(speed: Speed, *, is_identical: Callable[[int, int], bool] = lambda block, index: True) -> Answer:
    """Speed-ups that differ a little between prompts; `is_identical` takes a block and an index."""

    def answer(wanted: Candidate, index: int) -> PromptSample:
        block = first_block(wanted)
        wobble = 1 + index % (2 + block) / 50
        return sample(speed(block) * wobble, index, identical=is_identical(block, index))

    return answer


def scattered(speed: Speed, scatter: float) -> Answer:
    """Speed-ups with the same effect of a prompt on all candidates, and fresh noise of `scatter`."""
    stream = np.random.default_rng(0)

    def answer(wanted: Candidate, index: int) -> PromptSample:
        noise = float(np.exp(stream.normal(0.0, scatter)))
        return sample(speed(first_block(wanted)) * (1 + index % 3 / 10) * noise, index)

    return answer


def test_the_fastest_wins_whatever_its_trial_said() -> None:
    trials = [record(2.0, blocks=(1,)), record(1.1, blocks=(2,), number=1)]
    ranking = race(trials, ScriptedBench(steady(lambda block: 1.0 + block / 100)), range(12))
    assert [finalist.trial.number for finalist in ranking] == [1, 0]


def test_clearly_slower_finalists_drop_out_and_rank_last() -> None:
    bench = ScriptedBench(steady(lambda block: {1: 1.5, 2: 1.4, 3: 0.5}[block]))
    trials = [record(blocks=(block,), number=block) for block in (3, 1, 2)]
    ranking = race(trials, bench, range(24))
    assert ranking[0].trial.number == 1
    assert ranking[-1].trial.number == 3
    assert len(ranking[-1].measurement.samples) < 24
    assert len(ranking[0].measurement.samples) == 24


def test_all_finalists_run_the_same_prompts_in_turn() -> None:
    bench = ScriptedBench(steady(lambda block: 1.2))
    race([record(blocks=(1,)), record(blocks=(2,))], bench, range(6))
    assert bench.blocks_measured[:4] == [(1, (0, 1, 2, 3)), (2, (0, 1, 2, 3)), (1, (4, 5)), (2, (4, 5))]


def test_no_pass_reports_more_than_its_total() -> None:
    passes: list[tuple[int, int]] = []
    done: list[int] = []

    def begin(number: int, total: int) -> None:
        assert number == len(passes) + 1
        passes.append((sum(done), total))

    trials = [record(blocks=(block,), number=block) for block in (1, 2)]
    race(trials, ScriptedBench(steady(lambda block: 1.2)), range(6), begin, done.append)
    assert passes == [(12 * number, 12) for number in range(MOST_PASSES)], "six prompts tell nobody apart"
    assert sum(done) == 12 * MOST_PASSES


def _passes(speed: Callable[[int], float], scatter: float) -> tuple[list[int], int]:
    """The ranking by block, and how often the winner has gone over the prompts."""
    bench = ScriptedBench(scattered(speed, scatter))
    ranking = race([record(blocks=(1,)), record(blocks=(2,), number=1)], bench, range(16))
    return [each.trial.number for each in ranking], -(-len(ranking[0].measurement.samples) // 16)


def test_near_equals_go_over_the_prompts_again_until_told_apart() -> None:
    ranking, passes = _passes(lambda block: 1.0 + 0.02 * block, 0.04)
    assert passes > 1, "one pass leaves the two within each other's noise"
    assert ranking[0] == 1
    assert _passes(lambda block: 1.0 + 0.3 * block, 0.04)[1] == 1


def test_finalists_that_are_alike_need_not_be_told_apart() -> None:
    assert _passes(lambda block: 1.5 / (1 + 1e-4 * block), 0.002)[1] == 1


def test_a_single_finalist_wins() -> None:
    (only,) = race([record()], ScriptedBench(steady(lambda block: 1.2)), range(4))
    assert len(only.measurement.samples) == 4


def test_a_finalist_with_wrong_output_is_out_whatever_its_speed() -> None:
    # The first candidate changes the tokens of the second lap.
    speed = {1: 9.0, 2: 1.2, 3: 0.5}
    bench = ScriptedBench(steady(lambda block: speed[block], is_identical=lambda block, index: block != 1 or index < 4))
    trials = [record(blocks=(block,), number=block) for block in (1, 2, 3)]
    ranking = race(trials, bench, range(24))
    assert [finalist.trial.number for finalist in ranking] == [2, 3, 1]
    assert len(ranking[-1].measurement.samples) == 8


def test_a_race_without_an_exact_finalist_ends_with_those_that_fell() -> None:
    ranking = race(
        [record(blocks=(1,)), record(blocks=(2,))],
        ScriptedBench(steady(lambda block: 2.0, is_identical=lambda block, index: False)),
        range(12),
    )
    assert [len(finalist.measurement.samples) for finalist in ranking] == [4, 4]
