"""Measured figures of a profile, without a search."""

from __future__ import annotations

from typing import Any

from decoding.profile import DatasetFacts, Exactness, Interval, Measured, Rates, SearchCost


def measured(**figures: Any) -> Measured:
    """Return the figures of a search on a few prompts; `figures` override them."""
    values: dict[str, Any] = {
        "speedup": Interval(value=1.5, ci95=(1.3, 1.7)),
        "tokens_per_second": Rates(draft=150.0, plain=100.0),
        "draft_acceptance_rate": 0.5,
        "tokens_per_round": 2.5,
        "exact": Exactness(prompts=8, identical=8),
        "search": SearchCost(trials=3, seconds=1.0),
        "device": "a device",
        "versions": {},
        "dataset": DatasetFacts(name="d", fingerprint="f", tuning_prompts=8, held_out_prompts=8, max_new_tokens=16),
    }
    return Measured(**{**values, **figures})
