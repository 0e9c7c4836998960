"""Samples of a search as CSV: one line per candidate and held-out prompt, and one per finalist and prompt of the race."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
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
