"""The correction of predictions: what all share, what like drafts share, and how sure it is."""

from __future__ import annotations

import math

import pytest

from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from studies.prediction.guided import OF_ALIKE, SHARED, Residual
from studies.prediction.predictors import Prediction
from studies.prediction.replay import Replayed


def prediction(speedup: float, tokens_per_round: float = 2.0, passes_per_round: float = 2.0) -> Prediction:
    replayed = Replayed(
        tokens=round(1000 * tokens_per_round),
        rounds=1000,
        draft_passes=round(1000 * passes_per_round),
        cost=1000 * tokens_per_round / speedup,
    )
    return Prediction(LayerSkip.blocks((1,)), Fixed(), replayed, agreement=0.8, acceptance=0.8)


def test_nothing_is_corrected_before_a_trial() -> None:
    corrected, spread = Residual().corrected([prediction(1.2), prediction(1.5)])
    assert corrected == pytest.approx([1.2, 1.5])
    assert spread == pytest.approx([math.hypot(SHARED, OF_ALIKE)] * 2)


def test_error_that_all_trials_share_is_taken_out_everywhere() -> None:
    residual = Residual()
    for speedup in (1.0, 1.1, 1.3, 1.6, 2.0):
        residual.learn(prediction(speedup, 1.0 + speedup), 0.9 * speedup)
    (near, far), (sure, unsure) = residual.corrected([prediction(1.3, 2.3), prediction(1.3, 6.0, 8.0)])
    assert near == pytest.approx(0.9 * 1.3, rel=0.01)
    assert far == pytest.approx(0.9 * 1.3, rel=0.04)
    assert sure < unsure < SHARED


def test_error_of_like_drafts_is_taken_out_of_these() -> None:
    residual = Residual()
    for tokens, error in [(1.5, 1.0), (1.6, 1.0), (5.0, 0.8), (5.5, 0.8)] * 2:
        residual.learn(prediction(1.4, tokens, tokens), 1.4 * error)
    (short, long), _ = residual.corrected([prediction(1.4, 1.55, 1.55), prediction(1.4, 5.2, 5.2)])
    assert short == pytest.approx(1.4, rel=0.03)
    assert long == pytest.approx(0.8 * 1.4, rel=0.03)


def test_pairs_are_kept_in_order() -> None:
    residual = Residual()
    residual.learn(prediction(1.25), 1.5)
    residual.learn(prediction(2.0), 1.75)
    assert residual.pairs == [(1.25, 1.5), (2.0, 1.75)]


def test_running_trials_narrow_the_spread_near_them_and_move_no_correction() -> None:
    residual = Residual()
    for tokens in (1.5, 2.5, 3.5):
        residual.learn(prediction(1.4, tokens, tokens), 1.3)
    running, other = prediction(1.5, 6.0, 8.0), prediction(1.5, 1.5, 1.5)
    believing = residual.believing([running])
    before, spread = residual.corrected([running, other])
    after, narrowed = believing.corrected([running, other])
    assert after == pytest.approx(before, rel=1e-6)
    assert narrowed[0] < 0.7 * spread[0]
    assert narrowed[1] > 0.9 * spread[1]
    assert len(residual.pairs) == 3, "the correction itself has learned nothing"
    assert residual.believing([]) is residual
