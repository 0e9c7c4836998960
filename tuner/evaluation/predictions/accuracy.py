"""Agreement of predicted and measured speed-ups: rank, size and bias."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pydantic import Field
from scipy import stats

from decoding.documents.strict_yaml import Document
from studies.prediction.contract import Prediction
from studies.prediction.residual import Residual

MIN_PAIRS_TO_CORRELATE = 3


class Accuracy(Document):
    """Agreement of predictions with measurements of the same configurations."""

    count: int
    spearman: float | None = Field(description="rank correlation; None for fewer than 3 pairs or constant values")
    pearson_of_logs: float | None = Field(description="Pearson correlation of logarithms; None likewise")
    median_error: float = Field(description="median of |predicted / measured - 1|")
    worst_error: float = Field(description="maximum of |predicted / measured - 1|")
    bias: float = Field(description="geometric mean of measured / predicted; above 1 the predictions are too low")


def accuracy(predicted: Sequence[float], measured: Sequence[float]) -> Accuracy:
    """Compare speed-ups pairwise; raise ValueError unless both have the same length, at least 1."""
    if not predicted or len(predicted) != len(measured):
        raise ValueError(
            f"predictions and measurements must be equally many, at least 1, got {len(predicted)} and {len(measured)}"
        )
    logs = np.log(predicted), np.log(measured)
    errors = np.abs(np.exp(logs[0] - logs[1]) - 1)
    may_correlate = len(predicted) >= MIN_PAIRS_TO_CORRELATE and all(np.ptp(each) > 0 for each in logs)
    return Accuracy(
        count=len(predicted),
        spearman=float(stats.spearmanr(*logs).statistic) if may_correlate else None,
        pearson_of_logs=float(stats.pearsonr(*logs).statistic) if may_correlate else None,
        median_error=float(np.median(errors)),
        worst_error=float(np.max(errors)),
        bias=math.exp(float(np.mean(logs[1] - logs[0]))),
    )


def corrected_by_others(predictions: Sequence[Prediction], measured: Sequence[float]) -> list[float]:
    """Return predicted speed-ups, each corrected by all other pairs (leave one out).

    Raises ValueError for fewer than two pairs.
    """
    if len(predictions) < 2:
        raise ValueError(f"at least 2 predictions are needed, got {len(predictions)}")
    corrected = []
    for index, prediction in enumerate(predictions):
        residual = Residual()
        for other, (known, speedup) in enumerate(zip(predictions, measured, strict=True)):
            if other != index:
                residual.learn(known, speedup)
        (value,), _ = residual.corrected([prediction])
        corrected.append(float(value))
    return corrected
