"""Ship or not, why, and what to be careful about: sentences derived from the data of a search."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from decoding.profile import Interval
from studies.measurement import Measurement
from studies.ratios import Ratio
from tuner.measuring.contender import PROFILE
from tuner.review.document import SearchResult, StockComparison
from tuner.review.shipping import Shipping, decide, faster_stock

FEW_PROMPTS = 12
"""Held-out prompts, or batches, below which the verdict says that an interval over them is rough."""


@dataclass(frozen=True)
class ShipVerdict:
    """The decision that a search supports."""

    shipping: Shipping
    headline: str
    """One sentence or two: what to do, and the figure."""
    reasons: tuple[str, ...]
    cautions: tuple[str, ...]

    @property
    def ship(self) -> bool:
        """True if the profile ships, also if it is to be measured again."""
        return self.shipping is not Shipping.DO_NOT_SHIP


def verdict(result: SearchResult) -> ShipVerdict:
    """Return the verdict on a search."""
    confirmed, over_stock = result.confirmed, _over_stock(result.comparison)
    found = decide(claimed=result.objection is None, over_stock=over_stock, noise=result.noise.disturbances)
    whole = confirmed.end_to_end
    with_prefill = "" if whole is None else f" ({whole.speedup_interval()} with the prefill)"
    figures = f"{_speedup(confirmed)} times as fast as plain decoding on held-out prompts{with_prefill}"
    if result.objection is not None:
        best = (
            ""
            if not result.winner.candidate.draft.drafts
            else f"; the best draft decodes at {_speedup(confirmed)} of plain's speed"
        )
        headline = f"{found}: decode plainly. {_sentence(result.objection)}{best}."
    elif (faster := faster_stock(over_stock)) is not None:
        name, ratio = faster
        headline = f"{found}: {name} is faster, the profile has {ratio} of its speed."
    else:
        headline = f"{found}: {figures}." if found is Shipping.SHIP else f"{found}. {figures}."
    return ShipVerdict(found, headline, tuple(_reasons(result)), tuple(cautions(result)))


def _over_stock(comparison: StockComparison | None) -> dict[str, Interval]:
    contenders = {} if comparison is None else comparison.contenders
    return {name: each.profile_over_it for name, each in contenders.items() if name != PROFILE}


def _reasons(result: SearchResult) -> Iterator[str]:
    """Yield what speaks for or against the profile."""
    confirmed = result.confirmed
    ties = f", {confirmed.num_ties} differ at a numerical tie" if confirmed.num_ties else ""
    unit = "texts" if confirmed.batch_size > 1 else "prompts"
    yield f"{confirmed.num_identical} of {confirmed.num_prompts} held-out {unit} are identical to plain decoding{ties}."
    if result.comparison is not None:
        for name, each in result.comparison.contenders.items():
            if name != PROFILE:
                yield f"Decoding is {each.profile_over_it} times as fast as `{name}` ({each.description})."
    elif result.no_comparison is not None:
        yield f"Not compared with transformers' generate: {result.no_comparison}."


def cautions(result: SearchResult) -> Iterator[str]:
    """Yield reasons for care."""
    confirmed = result.confirmed
    if confirmed.num_ties:
        yield (
            f"{confirmed.num_ties} of {confirmed.num_prompts} texts differ from plain decoding where two tokens have equal logits "
            "within rounding. `--exact bitwise` removes such ties."
        )
    if signs := result.noise.signs:
        yield f"The machine was not quiet: {'; '.join(signs)}. Rates may be off: measure again while nothing else runs."
    if (count := len(confirmed.samples)) < FEW_PROMPTS:
        yield f"The interval is over {count} {'batches' if confirmed.batch_size > 1 else 'prompts'} only."
    if (level := _level_with(result)) is not None:
        yield level
    yield from result.cuts
    yield from result.cautions


def _level_with(result: SearchResult) -> str | None:
    """Return a sentence on the best rival that cannot be told from the winner, if there is one."""
    first, *others = result.rivals
    for other in others:
        ratio = _ratio(first.measurement, other.measurement)
        if ratio is not None and ratio.ci95[0] <= 1.0:
            return f"{other.trial} ({other.candidate.describe()}) is not clearly slower: the winner has {ratio} of its speed."
    return None


def _ratio(quicker: Measurement, slower: Measurement) -> Interval | None:
    """Return the ratio of two candidates' speed-ups on the prompts that both decoded; None for fewer than two.

    Each is paired with its own plain decoding: candidates are confirmed one after the other, on a machine that may change.
    """
    ratios = [{s.prompt: s.ratio for s in each.samples} for each in (quicker, slower)]
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
