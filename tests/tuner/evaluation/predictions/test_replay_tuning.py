"""Tuning of rules by replay alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from decoding.draft_length import RULES, DraftLengthRule, TopProbability
from decoding.drafts import Draft, LayerSkip
from studies.prediction.contract import Prediction
from studies.prediction.replay import Replayed
from tuner.evaluation.predictions.replay_tuning import tune_by_replay


@dataclass
class MadeUp:
    """Predictor whose optimum is a threshold of 0.37 and a draft length of 4."""

    max_tokens: int = 6
    asked: list[DraftLengthRule] = field(default_factory=list)

    def predict(self, draft: Draft, rule: DraftLengthRule) -> Prediction:
        self.asked.append(rule)
        threshold = rule.threshold if isinstance(rule, TopProbability) else 0.37
        cost = 50 * (1 + (threshold - 0.37) ** 2 + 0.1 * abs(rule.max_tokens - 4))
        return Prediction(draft, rule, Replayed(100, 50, 100, cost), agreement=0.5, acceptance=0.5)


def test_tuning_finds_the_best_setting() -> None:
    best = tune_by_replay(MadeUp(), LayerSkip(), "top_probability", count=200, seed=0)
    assert isinstance(best.rule, TopProbability)
    assert best.rule.max_tokens == 4
    assert best.rule.threshold == pytest.approx(0.37, abs=0.02)


def test_settings_are_in_range_and_replayed_once() -> None:
    predictor = MadeUp()
    best = tune_by_replay(predictor, LayerSkip(), "fixed", count=100, seed=0)
    assert best.rule.max_tokens == 4
    assert sorted(rule.max_tokens for rule in predictor.asked) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("rule", RULES)
def test_tuning_begins_with_the_defaults(rule: str) -> None:
    predictor = MadeUp()
    tune_by_replay(predictor, LayerSkip(), rule, count=1, seed=0)
    assert predictor.asked == [RULES[rule](rule=rule, max_tokens=6)]


def test_nothing_to_replay_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 replay"):
        tune_by_replay(MadeUp(), LayerSkip(), "fixed", count=0, seed=0)
