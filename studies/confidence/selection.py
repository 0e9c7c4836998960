"""ConfLayers' choice of blocks from their confidences (arXiv 2604.14612), as pure functions.

Formulas marked [code] follow the authors' released code, WA225/ConfLayers. It keeps confidences in float16, so every step up to
the threshold rounds. The rounding matters: it makes leading curvatures equal, which widens the neighbourhoods. The *published*
form rounds as the authors do. The *unrounded* form computes the same steps in float64 (our formulation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Form = Literal["published", "unrounded"]
"""The arithmetic of a selection: the authors' float16, or float64."""
DTYPES: dict[Form, type[np.floating[Any]]] = {"published": np.float16, "unrounded": np.float64}

LAMBDA_STEP = 0.05  # [code]
RATIO_SLACK = 0.25  # [code] lambda rises when the skip ratio exceeds the wanted one by more than this
MAX_STEPS = 100  # ours: lambda moves at most this often for one set of confidences


@dataclass(frozen=True)
class Selection:
    """The blocks that were selected, ascending, and the lambda that led to them."""

    skipped: tuple[int, ...]
    lam: float


@dataclass(frozen=True)
class LambdaSchedule:
    """The movement of lambda in a model of `num_layers` blocks.

    `skip_ratio` is the wanted share of the blocks between the first and the last. A `step` of 0 keeps lambda fixed.
    """

    num_layers: int
    skip_ratio: float
    step: float = LAMBDA_STEP
    window_growth_cap: int | None = None

    @property
    def least_skipped(self) -> int:
        """The least number of skipped blocks; a smaller set is selected again at once [code]."""
        return int((self.num_layers - 2) * self.skip_ratio) + 1

    def after(self, num_skipped: int, lam: float) -> float:
        """Return the lambda that follows a selection with `lam`: up after far too many blocks, down after too few [code].

        Rounded to six digits, so that repeated steps of 0.05 read as such.
        """
        ratio = num_skipped / max(1, self.num_layers - 2)
        if ratio > self.skip_ratio + RATIO_SLACK:
            return round(lam + self.step, 6)
        return round(lam - self.step, 6) if ratio < self.skip_ratio else lam

    def select(self, scores: Sequence[float] | np.ndarray, lam: float, form: Form = "published") -> Selection:
        """Select with `lam`, and again with a lower one while too few blocks are selected.

        The authors read new confidences for each repetition, after one more round of decoding; here the same `scores` are used.
        The set may still be too small, or empty, if lambda is fixed or the scores do not differ.
        """
        selection = self._once(scores, lam, form)
        for _ in range(MAX_STEPS if self.step else 0):
            if len(selection.skipped) >= self.least_skipped:
                break
            # A set of exactly the wanted ratio is too small as well; the authors' lambda would rest there.
            selection = self._once(scores, round(selection.lam - self.step, 6), form)
        return selection

    def settle(self, scores: Sequence[float] | np.ndarray, lam: float, form: Form = "published") -> Selection:
        """Select until lambda rests: neither too few blocks nor far too many, if the scores allow (our formulation).

        If one step leads from far too many blocks to too few, the set with far too many is returned.
        """
        selection = self.select(scores, lam, form)
        for _ in range(MAX_STEPS):
            higher = self.after(len(selection.skipped), selection.lam)
            if higher <= selection.lam:
                break
            smaller = self._once(scores, higher, form)
            if len(smaller.skipped) < self.least_skipped:
                break
            selection = smaller
        return selection

    def _once(self, scores: Sequence[float] | np.ndarray, lam: float, form: Form) -> Selection:
        cap = self.window_growth_cap
        skipped = select_from_scores(scores, lam=lam, num_layers=self.num_layers, window_growth_cap=cap, form=form)
        return Selection(tuple(skipped), lam)


def standardise(confidences: Sequence[float] | np.ndarray, form: Form = "published") -> np.ndarray:
    """Return (C - mean) / (std + 1e-6) of the confidences C of blocks 1 to L - 2, population std [code].

    Rounded to the form's precision at each step.
    """
    dtype = DTYPES[form]
    values = np.asarray(confidences, dtype=dtype)
    return (values - values.mean()) / dtype(float(values.std()) + 1e-6)


def select_from_scores(
    scores: Sequence[float] | np.ndarray,
    *,
    lam: float,
    num_layers: int,
    window_growth_cap: int | None = None,
    form: Form = "published",
) -> list[int]:
    """Return the blocks to skip, ascending, by the adaptive threshold of ConfLayers [code].

    `scores` are the standardised confidences of blocks 1 to `num_layers - 2` in order. A block is skipped if its score is below
    mean - lam * std of the blocks around it. The neighbourhood grows with depth and with the curvature of the scores.
    `window_growth_cap` caps the growth factor A. Raises ValueError if the number of scores is wrong.
    """
    z, n = np.asarray(scores, dtype=DTYPES[form]), num_layers - 2
    if len(z) != n or n < 1:
        raise ValueError(
            f"{num_layers} layers have {max(n, 0)} blocks between the first and the last, got {len(z)} values"
        )
    skipped = []
    for j, window in enumerate(_window_sizes(z, num_layers, window_growth_cap)):
        half = window // 2
        around = np.concatenate([z[max(0, j - half) : j], z[j + 1 : min(n, j + half + 1)]])
        # Mean and deviation are rounded, their combination is not: NumPy 1 computes it in float64.
        threshold = float(around.mean()) - lam * float(around.std()) if around.size else 0.0
        if float(z[j]) < threshold:
            skipped.append(j + 1)
    return skipped


def growth_cap(model_type: str, num_layers: int) -> int | None:
    """Return the cap of the growth factor A for a model type: L // 3 for Qwen, else None [code]."""
    return num_layers // 3 if "qwen" in model_type.lower() else None


def _window_sizes(z: np.ndarray, num_layers: int, cap: int | None) -> list[int]:
    """Return the number of neighbours that each block is compared with: 2 + A * curvature * depth [code]."""
    curvature = np.gradient(np.gradient(z)) if z.size > 1 else np.zeros_like(z)
    differs = np.flatnonzero(curvature != curvature[0])
    leading = int(differs[0]) if differs.size else z.size
    growth = 5 * leading if cap is None else min(cap, 5 * leading)
    centred = _centre_on_half(_scaled_to_one(curvature))
    return [2 + int(growth * float(g) * ((j + 1) / num_layers)) for j, g in enumerate(centred)]


def _scaled_to_one(values: np.ndarray) -> np.ndarray:
    """Return values moved and scaled to [0, 1] [code]; zeros if all are equal, where the authors' float16 divides by 0."""
    low, dtype = values.min(), values.dtype.type
    width = dtype(float(values.max() - low) + 1e-8)
    return (values - low) / width if width else np.zeros_like(values)


def _centre_on_half(values: np.ndarray) -> np.ndarray:
    """Return values in [0, 1], stretched so that their mean is one half [code]."""
    mean, low, high, dtype = values.mean(), values.min(), values.max(), values.dtype.type
    if np.isclose(high, low):
        return np.full_like(values, 0.5)
    scale = min(0.5 / float(high - mean), 0.5 / float(mean - low))
    return np.clip(dtype(scale) * values + dtype(0.5 - scale * float(mean)), 0.0, 1.0)
