"""Agreement of predictions with measurements, and the correction by all others."""

from __future__ import annotations

import pytest

from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from studies.prediction.contract import Prediction
from studies.prediction.replay import Replayed
from tuner.evaluation.predictions.accuracy import accuracy, corrected_by_others


def predicted_to_gain(speedup: float) -> Prediction:
    replayed = Replayed(tokens=100, rounds=50, draft_passes=100, cost=100 / speedup)
    return Prediction(LayerSkip(), Fixed(), replayed, agreement=0.5, acceptance=0.5)


def test_accuracy_of_known_pairs() -> None:
    found = accuracy([1.0, 2.0, 4.0, 3.0], [1.1, 2.2, 4.4, 3.3])
    assert (found.count, found.spearman) == (4, pytest.approx(1.0))
    assert found.pearson_of_logs == pytest.approx(1.0)
    assert found.median_error == pytest.approx(1 - 1 / 1.1)
    assert found.bias == pytest.approx(1.1)


def test_errors_are_relative_to_measurements_and_spearman_to_ranks() -> None:
    found = accuracy([1.0, 10.0, 2.0], [2.0, 4.0, 1.0])
    assert found.worst_error == pytest.approx(1.5)
    assert found.median_error == pytest.approx(1.0)
    assert found.spearman == pytest.approx(0.5)
    assert found.bias == pytest.approx((8 / 20) ** (1 / 3))


@pytest.mark.parametrize("pairs", [([1.0, 2.0], [1.0, 2.0]), ([1.0] * 3, [1.0, 2.0, 3.0])])
def test_too_few_or_constant_pairs_have_no_correlation(pairs: tuple[list[float], list[float]]) -> None:
    found = accuracy(*pairs)
    assert found.spearman is None
    assert found.pearson_of_logs is None


@pytest.mark.parametrize("pairs", [([], []), ([1.0], [1.0, 2.0])])
def test_unpaired_values_are_refused(pairs: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="equally many, at least 1"):
        accuracy(*pairs)


def test_the_correction_removes_a_common_bias_but_not_the_own_error() -> None:
    predicted = [0.9, 1.0, 1.1, 1.2, 1.3]
    measured = [1.2 * each for each in predicted]
    corrected = corrected_by_others([predicted_to_gain(each) for each in predicted], measured)
    assert corrected == pytest.approx(measured, rel=0.03)
    measured[2] *= 1.5  # must not affect the third correction
    again = corrected_by_others([predicted_to_gain(each) for each in predicted], measured)
    assert again[2] == pytest.approx(corrected[2])
    assert again[1] > corrected[1]


def test_a_single_prediction_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 predictions"):
        corrected_by_others([predicted_to_gain(1.0)], [1.0])
