"""Bayesian optimisation over the unit cube: a Gaussian process of the known points, and the highest upper bound.

As in `bayesian-optimization`, the package that the released code of Draft & Verify and of SWIFT uses: a Matern 2.5 kernel with
one length scale, standardised values, and five restarts of the fit; the upper confidence bound mean + kappa * deviation; the
best of 10,000 random points and of ten ascents by L-BFGS-B from other points. Both papers set alpha, the noise, to 0.01.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Matern

NOISE = 1e-2
RESTARTS = 5
NUM_RANDOM = 10_000
NUM_ASCENTS = 10
STEP = 1e-6
"""Step of the finite differences that an ascent follows."""

Point = NDArray[np.float64]
"""Point [switches]; each coordinate is between 0 (run the sublayer) and 1 (skip it)."""


def suggest_point(
    points: Sequence[Point], values: Sequence[float], *, size: int, kappa: float, rng: np.random.Generator
) -> Point:
    """Return the next point [size] to try, given the `values` of `points`, or a random one if there are none.

    Rounded to four digits, so that a stored point equals the point that was tried. The same `rng` gives the same point.
    """
    if not points:
        return rng.random(size).round(4)
    kernel, seed = Matern(nu=2.5), int(rng.integers(2**31))
    process = GaussianProcessRegressor(
        kernel, alpha=NOISE, normalize_y=True, n_restarts_optimizer=RESTARTS, random_state=seed
    )

    def bound(where: Point) -> Point:
        mean, deviation = process.predict(where, return_std=True)
        return np.asarray(mean + kappa * deviation)

    def depth_and_slope(point: Point) -> tuple[float, Point]:
        heights = bound(np.vstack([point, point + STEP * np.eye(size)]))
        return -float(heights[0]), -(heights[1:] - heights[0]) / STEP

    with warnings.catch_warnings():
        # Few or equal values lead to a length scale at its bound; a variance that rounding has made negative is set to 0.
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", message="Predicted variances smaller than 0", category=UserWarning)
        process.fit(np.stack(points), np.array(values))
        tries = rng.random((NUM_RANDOM, size))
        heights = bound(tries)
        best, highest = tries[heights.argmax()], float(heights.max())
        for start in rng.random((NUM_ASCENTS, size)):
            found = minimize(depth_and_slope, start, jac=True, method="L-BFGS-B", bounds=[(0.0, 1.0)] * size)
            if found.success and -found.fun >= highest:
                best, highest = found.x, -found.fun
    return np.clip(best, 0.0, 1.0).round(4)
