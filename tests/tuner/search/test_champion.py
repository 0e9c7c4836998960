"""The winner in turns with the champion: when it wins, and what is said when it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from studies.contract import Candidate
from studies.measurement import Measurement, PromptSample
from tests.support.records import candidate, sample
from tuner.measuring.paired import FarTooSlowError
from tuner.progress import Unwatched
from tuner.search.champion import challenge

WINNER, CHAMPION = candidate((2, 3)), candidate((4,))
NUM_PROMPTS = 8


class PlannedBench:
    """A bench on which the winner is faster than the champion by some ratios, in turn."""

    def __init__(self, ratios: Sequence[float], **facts: Any) -> None:
        self.indices = range(NUM_PROMPTS)
        self.asked: list[list[Candidate]] = []
        self._ratios, self._facts = ratios, facts

    def side_by_side(
        self, candidates: Sequence[Candidate], indices: Sequence[int], on_sample: Callable[[PromptSample], None]
    ) -> list[Measurement]:
        self.asked.append(list(candidates))
        ratios = [self._ratios[index % len(self._ratios)] for index in indices]
        found = [
            [sample(1.3, index, draft_seconds=1 / ratio, **self._facts) for index, ratio in enumerate(ratios)],
            [sample(1.3, index) for index in indices],
        ]
        for each in (*found[0], *found[1]):
            on_sample(each)
        return [Measurement(samples=tuple(each)) for each in found]


def test_a_winner_that_is_surely_faster_replaces_the_champion() -> None:
    bench: Any = PlannedBench([1.2, 1.3])
    found = challenge(CHAMPION, WINNER, None, bench, Unwatched())
    assert found.wins
    assert found.over_champion is not None
    assert found.over_champion.ci95[0] > 1.15
    assert bench.asked == [[WINNER, CHAMPION]], "in turns, not one after the other"


@pytest.mark.parametrize(
    ("bench", "reason"),
    [
        (PlannedBench([0.9, 1.2]), "the winner's speed over the champion's is 1.03"),
        (PlannedBench([0.8]), "the interval does not lie above 1"),
        (PlannedBench([1.2, 1.3], identical=False), "the winner's texts differ from plain decoding's"),
    ],
)
def test_any_doubt_leaves_the_champion_where_it_is(bench: Any, reason: str) -> None:
    found = challenge(CHAMPION, WINNER, None, bench, Unwatched())
    assert not found.wins
    assert reason in str(found.reason)


def test_what_cannot_win_is_not_measured() -> None:
    bench: Any = PlannedBench([1.2])
    assert challenge(CHAMPION, CHAMPION, None, bench, Unwatched()).reason == "the search has found the champion again"
    assert challenge(CHAMPION, WINNER, "it is slower", bench, Unwatched()).reason == "it is slower"
    assert bench.asked == []


def test_a_champion_that_is_too_slow_to_be_measured_is_left_to_a_person() -> None:
    class SlowBench(PlannedBench):
        def side_by_side(self, *_: Any) -> list[Measurement]:
            raise FarTooSlowError("9 s for a token")

    bench: Any = SlowBench([1.2])
    found = challenge(CHAMPION, WINNER, None, bench, Unwatched())
    assert not found.wins
    assert found.reason == "the champion was not measured (9 s for a token): promote the winner by hand"
