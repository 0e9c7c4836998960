"""The race of the finalists."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from studies.contract import Candidate, TrialRecord
from studies.measurement import PromptSample
from tests.support.benches import Answer, ScriptedBench, first_block
from tests.support.records import record, sample
from tuner.progress import Progress
from tuner.review.document import MeasuredCandidate
from tuner.search.race import MOST_PASSES, race, shortlist, unseen_by_trials

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


def racing(*blocks: int) -> list[TrialRecord]:
    """Trials that skip these blocks, numbered by them."""
    return [record(blocks=(block,), number=block) for block in blocks]


def numbers(ranking: list[MeasuredCandidate]) -> list[int]:
    return [int(each.trial.rpartition("/")[2]) for each in ranking]


def samples(ranking: list[MeasuredCandidate]) -> list[int]:
    return [len(each.measurement.samples) for each in ranking]


def test_the_best_of_all_and_of_each_study_race_on_unseen_prompts_and_the_fastest_wins() -> None:
    trials = [*(record(1.6 - block / 10, blocks=(block,), number=block) for block in (1, 2, 3))]
    trials.append(record(1.1, blocks=(4,), number=4, study="exit_layer"))
    assert [each.number for each in shortlist(trials, ["conf_layers", "exit_layer"], 2)] == [1, 2, 4]
    assert [each.number for each in shortlist(trials, [], 2, {trials[2].candidate.key: 9.0})] == [3, 1]
    assert shortlist([record(None)], ["conf_layers"], 2) == []
    assert list(unseen_by_trials(range(8), 2)) == list(range(2, 8))
    assert list(unseen_by_trials(range(2), 2)) == [0, 1], "trials on all prompts leave all to the race"
    bench = ScriptedBench(steady(lambda block: 1.0 + block / 100))
    assert numbers(race(trials[:2], bench, range(6), Progress()))[0] == 2, "whatever its trial said"
    assert bench.blocks_measured[:4] == [(1, (0, 1, 2, 3)), (2, (0, 1, 2, 3)), (1, (4, 5)), (2, (4, 5))], "in turn"


def test_clearly_slower_finalists_drop_out_and_rank_last() -> None:
    bench = ScriptedBench(steady(lambda block: {1: 1.5, 2: 1.4, 3: 0.5}[block]))
    ranking = race(racing(3, 1, 2), bench, range(24), Progress())
    assert (numbers(ranking)[0], numbers(ranking)[-1]) == (1, 3)
    assert samples(ranking) == [8, 8, 8], "the one that is left need not run on"


def test_no_pass_reports_more_than_its_total() -> None:
    class Counted(Progress):
        def __init__(self) -> None:
            self.totals: list[int | None] = []
            self.done = 0

        def stage(self, name: str, total: int | None = None) -> None:
            assert self.done == 12 * len(self.totals)
            self.totals.append(total)

        def advance(self, steps: int = 1) -> None:
            self.done += steps

    progress = Counted()
    race(racing(1, 2), ScriptedBench(steady(lambda block: 1.2)), range(6), progress)
    assert progress.totals == [12] * MOST_PASSES, "six prompts tell nobody apart"


def _passes(speed: Callable[[int], float], scatter: float) -> tuple[int, int]:
    """The winner's block, and how often it has gone over the prompts."""
    ranking = race(racing(1, 2), ScriptedBench(scattered(speed, scatter)), range(16), Progress())
    return numbers(ranking)[0], -(-samples(ranking)[0] // 16)


def test_near_equals_go_over_the_prompts_again_until_told_apart() -> None:
    winner, passes = _passes(lambda block: 1.0 + 0.02 * block, 0.04)
    assert passes > 1, "one pass leaves the two within each other's noise"
    assert winner == 2
    assert _passes(lambda block: 1.0 + 0.3 * block, 0.04)[1] == 1
    assert _passes(lambda block: 1.5 / (1 + 1e-4 * block), 0.002)[1] == 1, "those that are alike need not be"
    assert samples(race(racing(1), ScriptedBench(steady(lambda block: 1.2)), range(8), Progress())) == [4], "no race"


def test_a_pass_is_repeated_only_if_there_is_time_for_the_held_out_prompts() -> None:
    bench = ScriptedBench(scattered(lambda block: 1.0 + 0.02 * block, 0.04))
    ranking = race(racing(1, 2), bench, range(16), Progress(), may_repeat=lambda: False)
    assert samples(ranking) == [16, 16]


def test_a_finalist_with_wrong_output_is_out_whatever_its_speed() -> None:
    # The first candidate changes the tokens of the second lap.
    speed = {1: 9.0, 2: 1.2, 3: 0.5}
    bench = ScriptedBench(steady(lambda block: speed[block], is_identical=lambda block, index: block != 1 or index < 4))
    ranking = race(racing(1, 2, 3), bench, range(24), Progress())
    assert numbers(ranking) == [2, 3, 1]
    assert samples(ranking)[-1] == 8
    wrong = ScriptedBench(steady(lambda block: 2.0, is_identical=lambda block, index: False))
    assert samples(race(racing(1, 2), wrong, range(12), Progress())) == [4, 4], "it ends with those that fell"
