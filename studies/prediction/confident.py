"""Skip sets of ConfLayers (arXiv 2604.14612) for the sequences of a survey, as proposals of a search by prediction.

ConfLayers moves lambda during its search and decodes with each set. Here each confidence is read once per sequence, lambda takes
every value of a range, and the sets are rated by prediction like all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decoding.errors import UnsupportedModelError
from decoding.target import Target
from studies.confidence.confidences import CONFIDENCE_NAMES, CONFIDENCES, ConfidenceName
from studies.confidence.selection import DTYPES, Form, growth_cap, select_from_scores, standardise
from studies.prediction.origins import Origin
from studies.prediction.survey import JoinedSurvey, Survey, Written

METHOD = "conf_layers"
LAMBDAS = (0.0, -0.1, 0.1, -0.2, 0.2, -0.3, 0.3, -0.4, 0.4)
"""Values of lambda that are tried: the range that the paper sweeps, from its default on."""
FORMS: tuple[Form, ...] = ("published", "unrounded")
WINDOW = 32
"""Last generated tokens that a confidence is read from (W)."""
MOST_SEQUENCES = 3
"""Sequences that confidences are read from, evenly spread over the survey's: sets differ between prompts."""


@dataclass(frozen=True)
class ConfidentSet:
    """Blocks that ConfLayers skips, ascending, and the confidence and lambda that led to them."""

    blocks: tuple[int, ...]
    origin: Origin


@dataclass(frozen=True)
class Confident:
    """The sets of ConfLayers without duplicates and without the empty set."""

    sets: tuple[ConfidentSet, ...]
    remarks: tuple[str, ...] = ()
    """One remark for each confidence that this model does not give."""


def confident_skips(survey: Survey | JoinedSurvey) -> Confident:
    """Return the sets of every confidence, form and lambda, on some of the survey's sequences; lambda 0 comes first.

    A confidence is read off the last `WINDOW` generated tokens, after the keys and values of all tokens before them. Models
    with fewer than three blocks have no set.
    """
    target = survey.target
    scores: list[tuple[str, Form, np.ndarray]] = []
    remarks = []
    for name in CONFIDENCE_NAMES if target.num_layers > 2 else ():
        try:
            scores += [each for written in _spread(survey.written) for each in _scores(name, target, *written)]
        except UnsupportedModelError as cause:
            remarks.append(f"no sets of ConfLayers by {name}: {cause}")
    cap = growth_cap(target.config.model_type, target.num_layers)
    sets: dict[tuple[int, ...], Origin] = {}
    for lam in LAMBDAS:
        for label, form, values in scores:
            blocks = select_from_scores(values, lam=lam, num_layers=target.num_layers, window_growth_cap=cap, form=form)
            sets.setdefault(tuple(blocks), Origin(METHOD, f"{label}, lambda {lam:g}"))
    return Confident(tuple(ConfidentSet(*each) for each in sets.items() if each[0]), tuple(remarks))


def _spread(written: Sequence[Written]) -> list[Written]:
    """Return at most `MOST_SEQUENCES` of the sequences, evenly spread."""
    count = min(MOST_SEQUENCES, len(written))
    return [written[round(index)] for index in np.linspace(0, len(written) - 1, count)]


def _scores(
    name: ConfidenceName, target: Target, prompt: Sequence[int], continuation: Sequence[int]
) -> Iterator[tuple[str, Form, np.ndarray]]:
    """Yield label, form and scores of one confidence on one sequence: two passes serve both forms."""
    before, window = [*prompt, *continuation[:-WINDOW]], continuation[-WINDOW:]
    given = (torch.tensor([list(each)], device=target.device) for each in (window, before))
    parts = CONFIDENCES[name](target, *given)
    for form in FORMS:
        confidences = parts.astype(DTYPES[form]).sum(axis=1)
        label = name if form == "published" else f"{name} {form}"
        yield label, form, standardise(confidences[1 : target.num_layers - 1], form)
