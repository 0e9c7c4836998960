"""The race of the finalists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from studies.contract import Candidate
from studies.measurement import Measurement
from tests.support.records import record, sample
from tuner.search.race import MOST_PASSES, race


class TrackBench:
    """Speed-ups by first skipped block, with a wobble over the prompts."""

    def __init__(self, speed: Callable[[int], float]) -> None:
        self._speed = speed
        self.laps: list[tuple[int, tuple[int, ...]]] = []

    def measure(self, wanted: Candidate, indices: Sequence[int], **_: Any) -> Measurement:
        block = wanted.draft.skip_attention[0]
        self.laps.append((block, tuple(indices)))
        return Measurement(
            samples=tuple(sample(self._speed(block) * (1 + index % (2 + block) / 50), index) for index in indices)
        )


def test_the_fastest_wins_whatever_its_trial_said() -> None:
    trials = [record(2.0, blocks=(1,)), record(1.1, blocks=(2,), number=1)]
    ranking = race(trials, TrackBench(lambda block: 1.0 + block / 100), range(12))  # type: ignore[arg-type]
    assert [finalist.trial.number for finalist in ranking] == [1, 0]


def test_clearly_slower_finalists_drop_out_and_rank_last() -> None:
    bench = TrackBench(lambda block: {1: 1.5, 2: 1.4, 3: 0.5}[block])
    trials = [record(blocks=(block,), number=block) for block in (3, 1, 2)]
    ranking = race(trials, bench, range(24))  # type: ignore[arg-type]
    assert ranking[0].trial.number == 1
    assert ranking[-1].trial.number == 3
    assert len(ranking[-1].measurement.samples) < 24
    assert len(ranking[0].measurement.samples) == 24


def test_all_finalists_run_the_same_prompts_in_turn() -> None:
    bench = TrackBench(lambda block: 1.2)
    race([record(blocks=(1,)), record(blocks=(2,))], bench, range(6))  # type: ignore[arg-type]
    assert bench.laps[:4] == [(1, (0, 1, 2, 3)), (2, (0, 1, 2, 3)), (1, (4, 5)), (2, (4, 5))]


def test_the_race_reports_its_laps() -> None:
    done: list[int] = []
    race([record(blocks=(1,)), record(blocks=(2,))], TrackBench(lambda block: 1.2), range(6), on_lap=done.append)  # type: ignore[arg-type]
    assert sum(done) == 12 * MOST_PASSES, "six prompts tell nobody apart"


class NoisyBench(TrackBench):
    """Prompts alike for all, and times that scatter by some per cent, otherwise each time."""

    def __init__(self, speed: Callable[[int], float], scatter: float) -> None:
        super().__init__(speed)
        self._scatter, self._stream = scatter, np.random.default_rng(0)

    def measure(self, wanted: Candidate, indices: Sequence[int], **_: Any) -> Measurement:
        speed = self._speed(wanted.draft.skip_attention[0])
        noise = np.exp(self._stream.normal(0.0, self._scatter, len(indices)))
        ratios = [speed * (1 + index % 3 / 10) * factor for index, factor in zip(indices, noise, strict=True)]
        return Measurement(samples=tuple(map(sample, ratios, indices)))


def _passes(speed: Callable[[int], float], scatter: float) -> tuple[list[int], int]:
    """The ranking by block, and how often the winner has gone over the prompts."""
    bench = NoisyBench(speed, scatter)
    ranking = race([record(blocks=(1,)), record(blocks=(2,), number=1)], bench, range(16))  # type: ignore[arg-type]
    return [each.trial.number for each in ranking], -(-len(ranking[0].measurement.samples) // 16)


def test_near_equals_go_over_the_prompts_again_until_told_apart() -> None:
    ranking, passes = _passes(lambda block: 1.0 + 0.02 * block, 0.04)
    assert passes > 1, "one pass leaves the two within each other's noise"
    assert ranking[0] == 1
    assert _passes(lambda block: 1.0 + 0.3 * block, 0.04)[1] == 1


def test_finalists_that_are_alike_need_not_be_told_apart() -> None:
    assert _passes(lambda block: 1.5 / (1 + 1e-4 * block), 0.002)[1] == 1


def test_a_single_finalist_wins() -> None:
    (only,) = race([record()], TrackBench(lambda block: 1.2), range(4))  # type: ignore[arg-type]
    assert len(only.measurement.samples) == 4


def test_a_finalist_with_wrong_output_is_out_whatever_its_speed() -> None:
    class Unfaithful(TrackBench):
        def measure(self, wanted: Candidate, indices: Sequence[int], **options: Any) -> Measurement:
            measured = super().measure(wanted, indices, **options)
            if wanted.draft.skip_attention != (1,) or 5 not in indices:
                return measured
            return Measurement(samples=tuple(s.model_copy(update={"identical": False}) for s in measured.samples))

    bench = Unfaithful(lambda block: {1: 9.0, 2: 1.2, 3: 0.5}[block])
    trials = [record(blocks=(block,), number=block) for block in (1, 2, 3)]
    ranking = race(trials, bench, range(24))  # type: ignore[arg-type]
    assert [finalist.trial.number for finalist in ranking] == [2, 3, 1]
    assert len(ranking[-1].measurement.samples) == 8


def test_a_race_without_an_exact_finalist_ends_with_those_that_fell() -> None:
    class Unfaithful(TrackBench):
        def measure(self, wanted: Candidate, indices: Sequence[int], **options: Any) -> Measurement:
            measured = super().measure(wanted, indices, **options)
            return Measurement(samples=tuple(s.model_copy(update={"identical": False}) for s in measured.samples))

    ranking = race([record(blocks=(1,)), record(blocks=(2,))], Unfaithful(lambda block: 2.0), range(12))  # type: ignore[arg-type]
    assert [len(finalist.measurement.samples) for finalist in ranking] == [4, 4]
