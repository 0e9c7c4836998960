"""Fits the seconds of the terms to timed passes, and tells how well the fit predicts passes that it has not seen."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.optimize import nnls

from studies.costs.table import CostError, CostTable, TermSeconds
from studies.costs.terms import Pass, Terms, Vector

REWEIGHTINGS = 6
TOLERANCE = 0.02
"""Relative error up to which all passes weigh the same; beyond, a pass weighs as the error is absolute, not squared (Huber)."""
TIE = 1e-3
"""Weight of taking kinds of blocks for alike where nothing tells them apart; a timed pass weighs about 1."""
SHORTEST = 1e-6
"""Of the median pass: no shorter one weighs more."""
MOST_STEPS = 50
"""Steps of the solver for each term; it needs two or three."""


def fit_costs(terms: Terms, timed: Mapping[Pass, float], held_out: Mapping[Pass, float]) -> CostTable:
    """The table that explains the seconds of the passes `timed` best, its error measured on those of `held_out`.

    Non-negative least squares of the relative errors, in which disturbed passes weigh less (Huber's loss). No term falls where
    a pass gets wider or its context longer: the unknowns are the steps from one measured width or context to the next.

    ValueError if `timed` or `held_out` is empty.
    """
    if not timed or not held_out:
        raise ValueError("a cost table needs timed passes for the fit and others for its error")
    unit = float(np.median(list(timed.values()))) or 1.0
    seconds = np.fromiter(timed.values(), dtype=float) / unit
    per_step = _per_step(terms, np.stack([terms.amounts(each) for each in timed]))
    steps = _robust(per_step, seconds, _ties(terms))
    values = _risen(terms, steps) * unit
    return CostTable(
        kinds=terms.kinds,
        widths=terms.widths,
        contexts=terms.contexts,
        seconds=TermSeconds.model_validate({name: group.tolist() for name, group in terms.split(values).items()}),
        error=_error(terms, values, held_out),
    )


def _ties(terms: Terms) -> Vector:
    """Rows, to be zero, that hold the kinds of blocks together: few passes tell apart what each costs over several tokens."""
    places = terms.split(np.arange(terms.length, dtype=float))["wider"].astype(int)
    rows = np.eye(terms.length)[places]
    return TIE * (rows - rows.mean(axis=0)).reshape(-1, terms.length) if rows.size else np.zeros((0, terms.length))


def _robust(per_step: Vector, seconds: Vector, ties: Vector) -> Vector:
    """Steps that explain the seconds with the least relative errors; large ones, of disturbed passes, weigh less and less."""
    scale = 1.0 / np.maximum(seconds, SHORTEST)
    weights = np.ones_like(seconds)
    for _ in range(REWEIGHTINGS):
        row_scale = scale * np.sqrt(weights)
        rows = np.concatenate([per_step * row_scale[:, None], ties])
        steps, _ = nnls(rows, np.append(seconds * row_scale, np.zeros(len(ties))), maxiter=MOST_STEPS * rows.shape[1])
        weights = 1.0 / np.maximum(np.abs(per_step @ steps - seconds) * scale / TOLERANCE, 1.0)
    return np.asarray(steps)


def _per_step(terms: Terms, amounts: Vector) -> Vector:
    """What each step of a rising term adds to a pass, [passes, length]: all the amounts from that step on."""
    groups = []
    for name, group in terms.split(amounts).items():
        for axis in range(-terms.rising[name], 0):
            group = np.flip(np.cumsum(np.flip(group, axis), axis), axis)
        groups.append(group.reshape(len(amounts), -1))
    return np.concatenate(groups, axis=1)


def _risen(terms: Terms, steps: Vector) -> Vector:
    """Seconds of the terms, [length], from their steps."""
    groups = []
    for name, group in terms.split(steps).items():
        for axis in range(-terms.rising[name], 0):
            group = np.cumsum(group, axis)
        groups.append(np.ravel(group))
    return np.concatenate(groups)


def _error(terms: Terms, values: Vector, held_out: Mapping[Pass, float]) -> CostError:
    errors = [abs(float(terms.amounts(each) @ values) / seconds - 1) for each, seconds in held_out.items() if seconds]
    if not errors:
        errors = [0.0]  # a clock that stands still: nothing can be told apart
    return CostError(median=float(np.median(errors)), worst=float(max(errors)), num_passes=len(errors))
