"""Step curves over the budget spent, and intervals over seeds and prompts. Pure functions."""

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
"""Steps (budget spent, value from there on) in ascending order. Before the first step the value is 1, plain decoding."""


def value_at(curve: Curve, spent: float) -> float:
    """Return the value of `curve` at budget `spent`."""
    index = bisect_right([start for start, _ in curve], spent)
    return curve[index - 1][1] if index else 1.0


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean curve, with a step wherever one of them has one."""
    starts = sorted({start for curve in curves for start, _ in curve})
    return tuple((start, float(np.mean([value_at(curve, start) for curve in curves]))) for start in starts)


def reached_at(curve: Curve, value: float) -> float | None:
    """Return the budget spent when `curve` first reached `value`; None if never.

    A value of at most 1 is reached at 0, as plain decoding needs no search.
    """
    if value <= 1.0:
        return 0.0
    return next((start for start, height in curve if height >= value), None)


@dataclass(frozen=True)
class Finals:
    """Decode seconds of a search's final candidates on held-out prompts, [seeds, prompts], for plain decoding's tokens.

    `plain` is the plain decoding paired with each final candidate. Where a search ended with plain decoding, both are 1.
    """

    plain: np.ndarray
    draft: np.ndarray

    @classmethod
    def of(cls, measurements: Sequence[Measurement | None], num_prompts: int) -> Finals:
        """Build from one measurement per seed, None for plain decoding.

        Raises ValueError unless each measurement has the prompts once and in order.
        """
        plain, draft = np.ones((2, len(measurements), num_prompts))
        for seed, measured in enumerate(measurements):
            if measured is None:
                continue
            if [sample.prompt for sample in measured.samples] != list(range(num_prompts)):
                raise ValueError(f"a measurement must have {num_prompts} prompts, each once and in order")
            plain[seed] = [sample.plain_seconds for sample in measured.samples]
            # Only sampled texts differ in length.
            draft[seed] = [s.draft_seconds * s.plain_tokens / s.draft_tokens for s in measured.samples]
        return cls(plain, draft)

    def speedups(self) -> np.ndarray:
        """Return plain over drafted seconds of each seed, [seeds]."""
        return self.plain.mean(axis=1) / self.draft.mean(axis=1)

    def resampled(self) -> np.ndarray:
        """Return the mean speed-up over seeds in each resample of seeds and prompts, [resamples].

        All seeds share the prompts, so a resample draws prompts once for all seeds. The random stream is fixed, so searches
        with equal numbers of seeds and prompts have the same resamples, which pairs them.
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
    """Return the mean speed-up over seeds, with its 95 % bootstrap interval."""
    return _interval(float(finals.speedups().mean()), finals.resampled(), finals.plain.shape[1])


def quotient_interval(numerator: Finals, denominator: Finals) -> Interval:
    """Return the quotient of two mean speed-ups, with its paired 95 % interval.

    Raises ValueError unless both have the same numbers of seeds and prompts.
    """
    if numerator.plain.shape != denominator.plain.shape:
        raise ValueError(f"{numerator.plain.shape} seeds and prompts cannot be paired with {denominator.plain.shape}")
    value = float(numerator.speedups().mean() / denominator.speedups().mean())
    return _interval(value, numerator.resampled() / denominator.resampled(), numerator.plain.shape[1])


def _interval(value: float, resampled: np.ndarray, num_prompts: int) -> Interval:
    """Return the percentile interval, widened in logarithms for small samples.

    On a few dozen prompts percentiles are too close to each other. They are widened by the ratio of Student's t to the normal
    quantile and by the bias of a small sample's variance; see `studies.measurement`.
    """
    wider = stats.t.ppf(0.975, num_prompts - 1) / stats.norm.ppf(0.975) * math.sqrt(num_prompts / (num_prompts - 1))
    low, high = (value * (float(edge) / value) ** wider for edge in np.percentile(resampled, [2.5, 97.5]))
    return Interval(value=value, ci95=(low, high))
