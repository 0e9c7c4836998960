"""Fit of the terms' seconds to timed passes, with the error on held-out passes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.optimize import nnls

from studies.costs.table import CostError, CostTable, TermSeconds
from studies.costs.terms import Pass, Terms, Vector

REWEIGHTINGS = 6
TOLERANCE = 0.02
"""Relative error up to which the loss is quadratic; beyond it is linear (Huber)."""
TIE = 1e-3
"""Weight of the penalty on differences between kinds of blocks; a timed pass has weight 1, roughly."""
SHORTEST = 1e-6
"""Lower limit of a pass's seconds in its weight, relative to the median pass."""
MAX_ITERATIONS = 50
"""Maximum iterations of the solver per term; two or three are enough in practice."""


def fit_costs(terms: Terms, timed: Mapping[Pass, float], held_out: Mapping[Pass, float]) -> CostTable:
    """Fit a cost table to the `timed` passes and measure its error on `held_out`.

    Both map passes to seconds.

    Non-negative least squares of relative errors with Huber's loss, so that disturbed passes have less weight. The unknowns are
    the increments between consecutive measured widths or contexts, so that no term decreases with width or context.

    Raises ValueError if `timed` or `held_out` is empty.
    """
    if not timed or not held_out:
        raise ValueError("a cost table needs timed passes for the fit and held-out passes for its error")
    unit = float(np.median(list(timed.values()))) or 1.0
    seconds = np.fromiter(timed.values(), dtype=float) / unit
    per_step = _per_step(terms, np.stack([terms.amounts(each) for each in timed]))
    steps = _robust(per_step, seconds, _ties(terms))
    values = _risen(terms, steps) * unit
    return CostTable(
        kinds=terms.kinds,
        widths=terms.widths,
        contexts=terms.contexts,
        num_tokens=terms.num_tokens,
        bits=terms.bits,
        seconds=TermSeconds.model_validate({name: group.tolist() for name, group in terms.split(values).items()}),
        error=_error(terms, values, held_out),
    )


def _ties(terms: Terms) -> Vector:
    """Return penalty rows [rows, length] on differences between kinds of blocks.

    Few passes separate the kinds' costs of several tokens.
    """
    indices = terms.split(np.arange(terms.length, dtype=float))["wider"].astype(int)
    rows = np.eye(terms.length)[indices]
    return TIE * (rows - rows.mean(axis=0)).reshape(-1, terms.length) if rows.size else np.zeros((0, terms.length))


def _robust(per_step: Vector, seconds: Vector, ties: Vector) -> Vector:
    """Return the increments [length] with the least Huber loss, by iterative reweighting."""
    scale = 1.0 / np.maximum(seconds, SHORTEST)
    weights = np.ones_like(seconds)
    for _ in range(REWEIGHTINGS):
        row_scale = scale * np.sqrt(weights)
        rows = np.concatenate([per_step * row_scale[:, None], ties])
        steps, _ = nnls(
            rows, np.append(seconds * row_scale, np.zeros(len(ties))), maxiter=MAX_ITERATIONS * rows.shape[1]
        )
        weights = 1.0 / np.maximum(np.abs(per_step @ steps - seconds) * scale / TOLERANCE, 1.0)
    return np.asarray(steps)


def _per_step(terms: Terms, amounts: Vector) -> Vector:
    """Return the coefficients [passes, length] of the increments.

    An increment counts in all amounts from its index on."""
    groups = []
    for name, group in terms.split(amounts).items():
        for axis in range(-terms.rising[name], 0):
            group = np.flip(np.cumsum(np.flip(group, axis), axis), axis)
        groups.append(group.reshape(len(amounts), -1))
    return np.concatenate(groups, axis=1)


def _risen(terms: Terms, steps: Vector) -> Vector:
    """Return the seconds of the terms [length] from their increments."""
    groups = []
    for name, group in terms.split(steps).items():
        for axis in range(-terms.rising[name], 0):
            group = np.cumsum(group, axis)
        groups.append(np.ravel(group))
    return np.concatenate(groups)


def _error(terms: Terms, values: Vector, held_out: Mapping[Pass, float]) -> CostError:
    errors = [abs(float(terms.amounts(each) @ values) / seconds - 1) for each, seconds in held_out.items() if seconds]
    if not errors:
        errors = [0.0]  # a clock without resolution reads 0 for every pass
    return CostError(median=float(np.median(errors)), worst=float(max(errors)), num_passes=len(errors))
