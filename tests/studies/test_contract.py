"""The best of the trials: by what is expected or measured, each candidate once, with all that was measured of it."""

from __future__ import annotations

import pytest

from studies.contract import best_trials
from tests.support.records import measurement, record


def test_best_trials_are_ordered_by_expectation_else_by_measurement() -> None:
    trials = [record(1.5, blocks=(1,), number=0), record(1.3, blocks=(2,), number=1), record(None, number=2)]
    assert [each.number for each in best_trials(trials, 2)] == [0, 1]
    expected = {trials[0].candidate.key: 1.1}
    assert [each.number for each in best_trials(trials, 2, expected=expected)] == [1, 0]


def test_trials_of_one_candidate_by_several_studies_pool_their_samples() -> None:
    lucky = record(study="conf_layers", number=3, blocks=(1,), measurement=measurement([1.6, 1.6]))
    again = record(study="joint", number=0, blocks=(1,), measurement=measurement([1.0, 1.0, 1.0, 1.0]))
    other = record(study="joint", number=1, blocks=(2,), measurement=measurement([1.3, 1.3]))
    first, second = best_trials([lucky, again, other], 5)
    assert first.number == 1
    assert (second.study, second.number) == ("conf_layers", 3), "it stands as the study that had it first"
    assert second.measurement is not None
    assert len(second.measurement.samples) == 6
    assert second.speedup == pytest.approx((1.6 * 2 + 4) / 6)


def test_a_measurement_that_was_taken_over_counts_once() -> None:
    trials = [record(1.5, number=0), record(1.5, number=1, repeat_of=0)]
    (only,) = best_trials(trials, 5)
    assert only.measurement is not None
    assert len(only.measurement.samples) == 2
