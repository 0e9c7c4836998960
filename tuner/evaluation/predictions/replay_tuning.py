"""Tuning of a draft-length rule by replay alone (our formulation).

Settings are drawn at random, then near the best one. Nothing is decoded. A replay is a prediction, so its best setting is a
candidate to measure, not a result.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from decoding.draft_length import RULES, DraftLengthRule
from decoding.drafts import Draft
from studies.prediction.contract import Prediction
from studies.rule_space import draw_rule, near_rule

EXPLORING = 0.5
"""Share of the replays drawn from the whole space; the rest is drawn near the best setting."""
WIDEST, NARROWEST = 0.2, 0.02
"""Standard deviations of the first and the last local draw, as a share of the range."""


class RulePredictor(Protocol):
    """Predictor of drafts with any rule, such as `studies.prediction.predictor.Predictor`."""

    max_tokens: int
    """Longest draft that can be predicted, in tokens."""

    def predict(self, draft: Draft, rule: DraftLengthRule) -> Prediction:
        """Predict `draft` with `rule`."""


def tune_by_replay(predictor: RulePredictor, draft: Draft, rule: str, *, count: int, seed: int) -> Prediction:
    """Return the best of up to `count` settings of `rule` on `draft`, defaults included.

    Equal settings are replayed once. Raises ValueError if `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"at least 1 replay is needed, got {count}")
    stream = np.random.default_rng(seed)
    most = predictor.max_tokens
    default = RULES[rule](rule=rule)
    best = predictor.predict(draft, default.model_copy(update={"max_tokens": min(default.max_tokens, most)}))
    seen: set[DraftLengthRule] = {best.rule}
    num_exploring = round(count * EXPLORING)
    for number in range(1, count):
        if number < num_exploring:
            setting = draw_rule(rule, most, stream)
        else:
            progress = (number - num_exploring) / max(count - num_exploring - 1, 1)
            setting = near_rule(best.rule, most, WIDEST * (NARROWEST / WIDEST) ** progress, stream)
        if setting in seen:
            continue
        seen.add(setting)
        prediction = predictor.predict(draft, setting)
        if prediction.speedup > best.speedup:
            best = prediction
    return best
