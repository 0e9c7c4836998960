"""Tables of a search: the final table as text cells, and as CSV a line per candidate or finalist and prompt."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from studies.measurement import Measurement
from tuner.review.document import SearchReview

COLUMNS = (
    *(
        "trial",
        "prompt",
        "category",
        "speedup",
        "plain_seconds",
        "plain_tokens",
        "draft_seconds",
        "draft_tokens",
        "rounds",
    ),
    *("drafted", "accepted", "identical", "tie"),
)


@dataclass(frozen=True)
class FinalRow:
    """A line of the final table, for pages of text."""

    name: str
    description: str
    cells: tuple[str, ...]
    """Speed-up of decoding, end to end, tokens per second, plain decoding's on the same prompts, acceptance, identical outputs."""
    won: bool = False
    is_stock: bool = False


def final_rows(review: SearchReview) -> Iterator[FinalRow]:
    """Yield the candidates on held-out prompts, then stock generation."""
    for rival in review.rivals:
        measured = rival.measurement
        cells = (
            f"{measured.speedup_interval()}",
            "" if measured.end_to_end is None else f"{measured.end_to_end.speedup_interval()}",
            f"{measured.draft_tokens_per_second:.1f}",
            f"{measured.plain_tokens_per_second:.1f}",
            f"{measured.draft_acceptance_rate:.0%}",
            _identical(measured.num_identical, measured.num_prompts, measured.num_ties),
        )
        yield FinalRow(rival.trial, rival.description, cells, won=rival.trial == review.winner)
    if review.comparison is None:
        return
    plain = f"{review.comparison.plain_tokens_per_second.value:.1f}"
    for name, each in review.comparison.contenders.items():
        identical = _identical(each.identical, each.texts, each.ties)
        rate = f"{each.tokens_per_second.value:.1f}"
        cells = f"{each.over_plain}", f"{each.end_to_end_over_plain}", rate, plain, "", identical
        yield FinalRow(name, each.description, cells, is_stock=True)


def _identical(identical: int, count: int, ties: int) -> str:
    return f"{identical}/{count}" + (f" + {ties} ties" if ties else "")


def held_out_csv(review: SearchReview) -> str:
    """Return a line for each candidate of the final table and each held-out prompt, or batch."""
    return _csv((rival.trial, rival.measurement) for rival in review.rivals)


def race_csv(review: SearchReview) -> str:
    """Return a line for each finalist and each sample of the race, in the order of the result."""
    return _csv((raced.trial, raced.measurement) for raced in review.race)


def _csv(measured: Iterable[tuple[str, Measurement]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for trial, measurement in measured:
        writer.writerows(_rows(trial, measurement))
    return text.getvalue()


def _rows(trial: str, measurement: Measurement) -> Iterator[dict[str, Any]]:
    for sample in measurement.samples:
        yield {"trial": trial, **sample.model_dump(), "speedup": round(sample.ratio, 4)}
