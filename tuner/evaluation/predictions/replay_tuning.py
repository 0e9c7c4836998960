"""Parameters of a draft-length rule found by replay alone (our formulation): drawn at random, then moved about the best.

No text is decoded. A replay is a prediction, so what is found here is a candidate to measure and not a result.
"""

from __future__ import annotations

import numpy as np

from decoding.draft_length import RULES, DraftLengthRule
from studies.prediction.predictor import Drafting, Prediction, Predictor
from studies.rule_space import draw_rule, near_rule

EXPLORING = 0.5
"""Share of the replays that are drawn from the whole space, before the rest is spent near the best."""
WIDEST, NARROWEST = 0.2, 0.02
"""How far from the best the first and the last of the latter lie: standard deviations, as a share of the range."""


def tune_by_replay(predictor: Predictor, draft: Drafting, rule: str, *, count: int, seed: int) -> Prediction:
    """The best of about `count` settings of `rule` on `draft`, the rule's defaults among them; equal ones are replayed once.

    Settings are known apart by their parameters. ValueError if `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"needs one replay at least, got {count}")
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
