"""The error of predictions: learned from trials, and removed from further predictions.

Our formulation: a Gaussian process on the logarithm of measured over predicted speed-up. Its inputs describe how a draft spends its
time, because a cost table errs alike for similar drafts: the predicted speed-up, the tokens per round, and the draft passes
per round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from studies.prediction.contract import Prediction

# Standard deviations of the logarithm: the bias shared by all predictions, the bias shared by similar drafts, and trial noise.
SHARED, OF_ALIKE, NOISE = 0.15, 0.08, 0.03
SCALES = (0.2, 0.3, 0.3)


class Residual:
    """The correction of predictions, from the trials seen so far."""

    def __init__(self) -> None:
        kernel = ConstantKernel(SHARED**2, "fixed")
        kernel += ConstantKernel(OF_ALIKE**2, "fixed") * RBF(SCALES, "fixed") + WhiteKernel(NOISE**2, "fixed")
        self._process = GaussianProcessRegressor(kernel, optimizer=None)
        self._inputs: list[tuple[float, ...]] = []
        self._pairs: list[tuple[float, float]] = []

    @property
    def pairs(self) -> tuple[tuple[float, float], ...]:
        """Predicted and measured speed-up of each trial, in order."""
        return tuple(self._pairs)

    def learn(self, prediction: Prediction, measured: float, predicted: float | None = None) -> None:
        """Add a trial with its measured speed-up.

        `predicted` is the predicted speed-up on the prompts of the trial, if the prediction covers more.
        """
        self._inputs.append(_features(prediction))
        self._pairs.append((prediction.speedup if predicted is None else predicted, measured))
        errors = [math.log(measured / predicted) for predicted, measured in self._pairs]
        self._process.fit(np.array(self._inputs), np.array(errors))

    def believing(self, pending: Sequence[Prediction]) -> Residual:
        """Return a correction that takes the corrected predictions of running trials for their results.

        Near them the spread is then as small as if they had ended, so that another candidate is chosen ("kriging believer",
        Ginsbourger, Le Riche and Carraro, 2010).
        """
        if not pending:
            return self
        believed, _ = self.corrected(pending)
        other = Residual()
        other._inputs = [*self._inputs, *map(_features, pending[:-1])]
        other._pairs = [
            *self._pairs,
            *zip((each.speedup for each in pending[:-1]), believed[:-1].tolist(), strict=True),
        ]
        other.learn(pending[-1], float(believed[-1]))
        return other

    def corrected(self, predictions: Sequence[Prediction]) -> tuple[np.ndarray, np.ndarray]:
        """Return the corrected speed-ups [predictions] and the standard deviation [predictions] of their logarithm.

        The standard deviation excludes trial noise.
        """
        mean, spread = self._process.predict(np.array([_features(each) for each in predictions]), return_std=True)
        raw = np.array([prediction.speedup for prediction in predictions])
        # scikit-learn's spread includes the noise, because the noise is part of the kernel.
        return raw * np.exp(mean), np.sqrt(np.maximum(spread**2 - NOISE**2, 0.0))


def _features(prediction: Prediction) -> tuple[float, ...]:
    replayed = prediction.replayed
    per_round = replayed.tokens / replayed.rounds, replayed.draft_passes / replayed.rounds
    return (math.log(prediction.speedup), math.log(per_round[0]), math.log1p(per_round[1]))
