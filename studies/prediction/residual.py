"""How far predictions are from what real decoding then showed: learnt from trials, and taken out of further predictions.

Our formulation: a Gaussian process on the logarithm of measured over predicted speed-up. Its inputs say how a draft spends its
time, as that is what a table of costs gets wrong alike for alike drafts: what is foretold, how many tokens a round writes, and
how many draft passes it takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from studies.prediction.contract import Prediction

# Standard deviations of the logarithm: a bias that all predictions share, one that like drafts share, and the noise of a trial.
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
        """The speed-up predicted and the one measured of each trial, in the order they were learnt."""
        return tuple(self._pairs)

    def learn(self, prediction: Prediction, measured: float, predicted: float | None = None) -> None:
        """Take in a trial and the speed-up that was measured; `predicted` is what was foretold for the prompts it was measured
        on, if those are not all the prediction is of."""
        self._inputs.append(_features(prediction))
        self._pairs.append((prediction.speedup if predicted is None else predicted, measured))
        errors = [math.log(measured / predicted) for predicted, measured in self._pairs]
        self._process.fit(np.array(self._inputs), np.array(errors))

    def corrected(self, predictions: Sequence[Prediction]) -> tuple[np.ndarray, np.ndarray]:
        """Speed-ups [predictions] with the error expected taken out, and the standard deviation [predictions] of their logarithm,
        the noise of a trial not in it."""
        mean, spread = self._process.predict(np.array([_features(each) for each in predictions]), return_std=True)
        raw = np.array([prediction.speedup for prediction in predictions])
        # scikit-learn's spread holds the noise, as that is a part of the kernel.
        return raw * np.exp(mean), np.sqrt(np.maximum(spread**2 - NOISE**2, 0.0))


def _features(prediction: Prediction) -> tuple[float, ...]:
    replayed = prediction.replayed
    per_round = replayed.tokens / replayed.rounds, replayed.draft_passes / replayed.rounds
    return (math.log(prediction.speedup), math.log(per_round[0]), math.log1p(per_round[1]))
