"""Ship or not, why, and what to be careful about: sentences derived from the data of a search."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from decoding.profile import Interval
from studies.measurement import Measurement
from studies.ratios import Ratio
from tuner.review.document import SearchReview, StockComparison

FEW_PROMPTS = 12
"""Held-out prompts, or batches, below which the verdict says that an interval over them is rough."""


@dataclass(frozen=True)
class ShipVerdict:
    """The decision that a search supports."""

    ship: bool
    headline: str
    """One sentence: ship or not, and the figure."""
    reasons: tuple[str, ...]
    cautions: tuple[str, ...]


def verdict(review: SearchReview) -> ShipVerdict:
    """Return the verdict on a search.

    The profile ships if the search claims a speed-up, and no stock way of generating is faster with 95 % confidence.
    """
    confirmed = review.confirmed
    if review.objection is not None:
        figures = "" if not _drafts(review) else f"; the best draft decodes at {_speedup(confirmed)} of plain's speed"
        headline = f"Do not ship: decode plainly. {_sentence(review.objection)}{figures}"
        return ShipVerdict(False, f"{headline}.", tuple(_reasons(review)), tuple(cautions(review)))
    if (faster := faster_stock(review.comparison)) is not None:
        name, ratio = faster
        headline = f"Do not ship: {name} is faster, the profile has {ratio} of its speed"
        return ShipVerdict(False, f"{headline}.", tuple(_reasons(review)), tuple(cautions(review)))
    headline = f"Ship: decoding is {_speedup(confirmed)} times as fast as plain decoding on held-out prompts"
    return ShipVerdict(True, f"{headline}.", tuple(_reasons(review)), tuple(cautions(review)))


def faster_stock(comparison: StockComparison | None) -> tuple[str, Interval] | None:
    """Return the stock contender that the profile is surely slower than, and the ratio; None if there is none."""
    if comparison is None:
        return None
    slower = [
        (name, each.profile_over_it)
        for name, each in comparison.contenders.items()
        if name != "profile" and each.profile_over_it.ci95[1] < 1.0
    ]
    return min(slower, key=lambda pair: pair[1].value, default=None)


def _drafts(review: SearchReview) -> bool:
    trial = review.winning_trial
    return trial is not None and trial.candidate.draft.drafts


def _reasons(review: SearchReview) -> Iterator[str]:
    """Yield what speaks for or against the profile."""
    confirmed = review.confirmed
    if (whole := confirmed.end_to_end) is not None:
        yield f"End to end, with the prefill, the speed-up is {whole.speedup_interval()}."
    ties = f", {confirmed.num_ties} differ at a numerical tie" if confirmed.num_ties else ""
    unit = "texts" if confirmed.batch_size > 1 else "prompts"
    yield f"{confirmed.num_identical} of {confirmed.num_prompts} held-out {unit} are identical to plain decoding{ties}."
    if review.comparison is not None:
        for name, each in review.comparison.contenders.items():
            if name != "profile":
                yield f"The profile has {each.profile_over_it} of the decoding speed of `{name}` ({each.description})."
    elif review.no_comparison is not None:
        yield f"Not compared with transformers' generate: {review.no_comparison}."


def cautions(review: SearchReview) -> Iterator[str]:
    """Yield reasons for care."""
    confirmed = review.confirmed
    if confirmed.num_ties:
        yield (
            f"{confirmed.num_ties} of {confirmed.num_prompts} texts differ from plain decoding where two tokens have equal logits "
            "within rounding. `--exact bitwise` removes such ties."
        )
    if signs := review.noise.signs:
        yield f"The machine was not quiet: {'; '.join(signs)}. Rates may be off; measure again with `--wait-quiet`."
    if (count := len(confirmed.samples)) < FEW_PROMPTS:
        yield f"The interval is over {count} {'batches' if confirmed.batch_size > 1 else 'prompts'} only."
    if (level := _level_with(review)) is not None:
        yield level
    yield from review.cuts
    yield from review.cautions


def _level_with(review: SearchReview) -> str | None:
    """Return a sentence on the best rival that cannot be told from the winner, if there is one."""
    first, *others = review.rivals
    for other in others:
        ratio = _ratio(first.measurement, other.measurement)
        if ratio is not None and ratio.ci95[0] <= 1.0:
            return f"{other.trial} ({other.description}) is not clearly slower: the winner has {ratio} of its speed."
    return None


def _ratio(faster: Measurement, slower: Measurement) -> Interval | None:
    """Return the ratio of two candidates' speed-ups on the prompts that both decoded; None for fewer than two.

    Each is paired with its own plain decoding: candidates are confirmed one after the other, on a machine that may change.
    """
    ratios = [{s.prompt: s.ratio for s in each.samples} for each in (faster, slower)]
    common = sorted(ratios[0].keys() & ratios[1].keys())
    if len(common) < 2:
        return None
    logs = np.array([[math.log(each[prompt]) for prompt in common] for each in ratios])
    difference = logs[0] - logs[1]
    return Ratio.of(float(np.exp(difference.mean())), difference).interval()


def _speedup(measured: Measurement) -> str:
    return f"{measured.speedup_interval()}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
