"""What is believed of the speeds at one load: a Kalman filter on logarithms (our formulation).

The state is the log speed of plain rounds, the level, and the log speed-up of each draft over it. A window of an arm shows the
level plus its speed-up, with noise. All of them drift: the level with the lengths of the texts and the load of the machine, the
speed-ups with the text. So windows that lie close together in time are compared, and old evidence fades.

A window far from what was believed may be a disturbance of the machine, and counts as one at the edge of what was to be expected.
If the next window of its arm is far off on the same side, something has changed, and is uncertain again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PLAIN = 0
"""Index of the arm without drafts; drafts are counted from 1."""
PLAIN_NAME = "plain"
"""Name of that arm."""
UNKNOWN_LEVEL = 5.0
"""Standard deviation of the level before anything was measured."""
LEVEL_DRIFT, SPEEDUP_DRIFT = 0.02, 0.015
"""Standard deviations of the drift from one window to the next."""
LOAD_EFFECT = 0.5
"""Standard deviation of the level's change if the number of sequences side by side changes by a factor of e."""
FIRST_NOISE, LEAST_NOISE, MOST_NOISE = 0.1, 0.01, 0.4
"""Standard deviation of a window: before any was seen, and its bounds."""
NOISE_MEMORY = 1 / 16
"""Weight of the latest window in the estimate of the noise."""
OWN_NOISE = 4
"""Windows of an arm after which its own noise counts as much as the noise of all arms."""
SURPRISE = 3.0
"""Standard deviations beyond which a window is a surprise."""


@dataclass(frozen=True)
class Prior:
    """What is believed of a log speed-up before anything was measured here."""

    mean: float
    sd: float


class SpeedBelief:
    """Belief on the speed of plain rounds and on the speed-ups of drafts at one load."""

    def __init__(self, priors: Sequence[Prior]) -> None:
        self._mean = np.array([0.0, *(prior.mean for prior in priors)])
        self._covariance = np.diag([UNKNOWN_LEVEL**2, *(prior.sd**2 for prior in priors)])
        self._noise = np.full(len(self._mean) + 1, FIRST_NOISE**2)  # of each arm, and of all together
        self._num_windows = np.zeros(len(self._mean))
        self._drift = np.diag([LEVEL_DRIFT**2] + [SPEEDUP_DRIFT**2] * len(priors))
        self._most = np.array([prior.sd**2 + 1.0 for prior in priors])
        self._far_off: tuple[int, bool] | None = None

    @property
    def is_surprised(self) -> bool:
        """True if the latest window was far off: another one of its arm shows whether something has changed."""
        return self._far_off is not None

    @property
    def log_plain_speed(self) -> float:
        """Mean of the log tokens per second of plain rounds."""
        return float(self._mean[PLAIN])

    @property
    def log_speedups(self) -> np.ndarray:
        """Means [arms] of the log speed-ups; plain rounds have 0."""
        return np.array([0.0, *self._mean[1:]])

    @property
    def sds(self) -> np.ndarray:
        """Standard deviations [arms] of the log speed-ups."""
        return np.array([0.0, *np.sqrt(np.diag(self._covariance)[1:])])

    def sample(self, stream: np.random.Generator) -> np.ndarray:
        """Return log speed-ups [arms] drawn from the belief."""
        drawn = stream.multivariate_normal(self._mean[1:], self._covariance[1:, 1:], method="cholesky")
        return np.array([0.0, *drawn])

    def age(self, num_windows: float, log_load_change: float = 0.0) -> None:
        """Let the state drift: windows have passed, and the number of sequences has changed by a factor."""
        self._covariance += num_windows * self._drift
        self._covariance[0, 0] += (LOAD_EFFECT * log_load_change) ** 2
        # What has not been measured for long is no less known than without any evidence.
        variances = np.diag(self._covariance)[1:]
        shrink = np.array([1.0, *np.sqrt(np.minimum(1.0, self._most / variances))])
        self._covariance *= np.outer(shrink, shrink)

    def learn(self, arm: int, log_speed: float) -> bool:
        """Take in a window of an arm: its log tokens per second and sequence. Return True if drafts have changed."""
        seen = np.zeros(len(self._mean))
        seen[0] = seen[arm] = 1.0
        error = log_speed - seen @ self._mean
        noise = self._noise_of(arm)
        variance = float(seen @ self._covariance @ seen + noise)
        score = error / np.sqrt(variance)
        if abs(score) > SURPRISE:
            surprise = arm, bool(error > 0)
            if self._far_off != surprise:
                self._far_off = surprise
                edge = np.copysign(SURPRISE * np.sqrt(variance), error)
                self._move(seen, edge, variance)
                return False
            # A change: of the level, or, if there were drafts, of any speed-up.
            self._covariance[0, 0] += error**2
            if arm != PLAIN:
                self._covariance[1:, 1:] += np.eye(len(self._mean) - 1) * error**2
            variance = float(seen @ self._covariance @ seen + noise)
        self._far_off = None
        scale = 1.0 + NOISE_MEMORY * (min(score**2, SURPRISE**2) - 1.0)
        self._move(seen, error, variance)
        for which in (arm, -1):
            self._noise[which] = np.clip(self._noise[which] * scale, LEAST_NOISE**2, MOST_NOISE**2)
        self._num_windows[arm] += 1
        return abs(score) > SURPRISE and arm != PLAIN

    def _move(self, seen: np.ndarray, error: float, variance: float) -> None:
        """Correct the state by the error [1] of what is `seen` [arms] of it, and the variance of that error."""
        gain = self._covariance @ seen / variance
        self._mean = self._mean + gain * error
        self._covariance = self._covariance - np.outer(gain, seen @ self._covariance)

    def _noise_of(self, arm: int) -> float:
        """Return the variance of a window of an arm; one that was seldom used is taken for as noisy as the others."""
        own = self._num_windows[arm] / (self._num_windows[arm] + OWN_NOISE)
        return float(own * self._noise[arm] + (1 - own) * self._noise[-1])
