"""Arithmetic of comparing searches: step curves over what was spent, and intervals over seeds and prompts. Pure functions."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from decoding.profile import Interval
from studies.measurement import Measurement

RESAMPLES = 9_999

Curve = tuple[tuple[float, float], ...]
"""Steps: (what had been spent, the value from there on), in order; before the first nothing had been found, and 1 holds."""


def value_at(curve: Curve, spent: float) -> float:
    """The value when so much had been spent."""
    place = bisect_right([start for start, _ in curve], spent)
    return curve[place - 1][1] if place else 1.0


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean over seeds, with a step wherever one of them has one."""
    starts = sorted({start for curve in curves for start, _ in curve})
    return tuple((start, float(np.mean([value_at(curve, start) for curve in curves]))) for start in starts)


def reached_at(curve: Curve, value: float) -> float | None:
    """What had been spent when the curve first was at `value` or above; 0 for a value of plain decoding, None for never."""
    if value <= 1.0:
        return 0.0
    return next((start for start, height in curve if height >= value), None)


@dataclass(frozen=True)
class Finals:
    """Seconds per token on the held-out prompts of what a search ended with, a row a seed: [seeds, prompts] both.

    The plain decoding that each was paired with stands beside it; where plain decoding is what the search ended with, both are 1.
    """

    plain: np.ndarray
    draft: np.ndarray

    @classmethod
    def of(cls, measurements: Sequence[Measurement | None], num_prompts: int) -> Finals:
        """One measurement a seed, None for plain decoding; ValueError if one does not hold the prompts in order."""
        plain, draft = np.ones((2, len(measurements), num_prompts))
        for seed, measured in enumerate(measurements):
            if measured is None:
                continue
            if [sample.prompt for sample in measured.samples] != list(range(num_prompts)):
                raise ValueError(f"a measurement must hold {num_prompts} prompts, each once and in order")
            plain[seed] = [sample.plain_seconds / sample.plain_tokens for sample in measured.samples]
            draft[seed] = [sample.draft_seconds / sample.draft_tokens for sample in measured.samples]
        return cls(plain, draft)

    def speedups(self) -> np.ndarray:
        """The speed-up of each seed, [seeds]: mean plain over mean drafted seconds per token."""
        return self.plain.mean(axis=1) / self.draft.mean(axis=1)

    def resampled(self) -> np.ndarray:
        """The mean speed-up over seeds in each resample of seeds and of prompts, [resamples].

        All seeds share the prompts, so one draw of prompts serves them all. The random stream is fixed: two searches with as
        many seeds and prompts are resampled alike, which pairs them.
        """
        num_seeds, num_prompts = self.plain.shape
        stream = np.random.default_rng(0)
        of_seed = np.empty((num_seeds, RESAMPLES))
        prompts = stream.integers(num_prompts, size=(RESAMPLES, num_prompts))
        for seed in range(num_seeds):  # one at a time: [resamples, prompts] is large enough
            of_seed[seed] = self.plain[seed][prompts].mean(axis=1) / self.draft[seed][prompts].mean(axis=1)
        seeds = stream.integers(num_seeds, size=(num_seeds, RESAMPLES))
        return np.asarray(np.take_along_axis(of_seed, seeds, axis=0).mean(axis=0))


def speedup_interval(finals: Finals) -> Interval:
    """The mean speed-up over seeds, with its 95 % interval: bootstrap over seeds and prompts, as wide as few prompts need."""
    return _interval(float(finals.speedups().mean()), finals.resampled(), finals.plain.shape[1])


def quotient_interval(ahead: Finals, behind: Finals) -> Interval:
    """The mean speed-up of `ahead` over that of `behind`, resampled together: the same seeds and prompts of both.

    ValueError if they have not as many seeds and prompts.
    """
    if ahead.plain.shape != behind.plain.shape:
        raise ValueError(f"{ahead.plain.shape} seeds and prompts cannot be paired with {behind.plain.shape}")
    value = float(ahead.speedups().mean() / behind.speedups().mean())
    return _interval(value, ahead.resampled() / behind.resampled(), ahead.plain.shape[1])


def _interval(value: float, resampled: np.ndarray, num_prompts: int) -> Interval:
    """The percentiles, drawn apart (in logarithms) by what Student's t and the variance of a small sample ask for: on a few dozen
    prompts they lie too close, see `studies.measurement`."""
    wider = stats.t.ppf(0.975, num_prompts - 1) / stats.norm.ppf(0.975) * math.sqrt(num_prompts / (num_prompts - 1))
    low, high = (value * (float(edge) / value) ** wider for edge in np.percentile(resampled, [2.5, 97.5]))
    return Interval(value=value, ci95=(low, high))
