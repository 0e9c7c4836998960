"""Bayesian optimisation over the unit cube: a Gaussian process of the known points, and the highest upper bound.

As in `bayesian-optimization`, the package that the released code of Draft & Verify and of SWIFT uses: a Matern 2.5 kernel with
one length scale, standardised values, and five restarts of the fit; the upper confidence bound mean + kappa * deviation; the
best of 10,000 random points and of ten ascents by L-BFGS-B from other points. Both papers set alpha, the noise, to 0.01.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Matern

from benchmarks.searches.switches import SkipPoint

NOISE = 1e-2
RESTARTS = 5
NUM_RANDOM = 10_000
NUM_ASCENTS = 10
STEP = 1e-6
"""Step of the finite differences that an ascent follows."""


def suggest_point(
    points: Sequence[SkipPoint], values: Sequence[float], *, size: int, kappa: float, rng: np.random.Generator
) -> SkipPoint:
    """Return the next point [size] to try, given the `values` of `points`, or a random one if there are none.

    Rounded to four digits, so that a stored point equals the point that was tried. The same `rng` gives the same point.
    """
    if not points:
        return rng.random(size).round(4)
    bound = UpperBound(np.stack(points), np.array(values), kappa=kappa, seed=int(rng.integers(2**31)))
    tries = rng.random((NUM_RANDOM, size))
    heights = bound.at(tries)
    best, highest = tries[heights.argmax()], float(heights.max())
    for start in rng.random((NUM_ASCENTS, size)):
        found = minimize(bound.depth_and_slope, start, jac=True, method="L-BFGS-B", bounds=[(0.0, 1.0)] * size)
        if found.success and -found.fun >= highest:
            best, highest = found.x, -found.fun
    return np.clip(best, 0.0, 1.0).round(4)


class UpperBound:
    """Upper bound mean + kappa * deviation of a Gaussian process fitted to `points` [count, size] and `values` [count]."""

    def __init__(self, points: SkipPoint, values: SkipPoint, *, kappa: float, seed: int) -> None:
        self._kappa = kappa
        self._process = GaussianProcessRegressor(
            kernel=Matern(nu=2.5), alpha=NOISE, normalize_y=True, n_restarts_optimizer=RESTARTS, random_state=seed
        )
        with warnings.catch_warnings():
            # Few or equal values lead to a length scale at its bound.
            warnings.simplefilter("ignore", ConvergenceWarning)
            self._process.fit(points, values)

    def at(self, points: SkipPoint) -> SkipPoint:
        """Return the bound [count] at `points` [count, size]."""
        with warnings.catch_warnings():
            # A variance that rounding has made negative is set to 0.
            warnings.filterwarnings("ignore", message="Predicted variances smaller than 0", category=UserWarning)
            mean, deviation = self._process.predict(points, return_std=True)
        return np.asarray(mean + self._kappa * deviation)

    def depth_and_slope(self, point: SkipPoint) -> tuple[float, SkipPoint]:
        """Return minus the bound at a point [size], and its gradient; one prediction gives all differences."""
        heights = self.at(np.vstack([point, point + STEP * np.eye(len(point))]))
        return -float(heights[0]), -(heights[1:] - heights[0]) / STEP
