"""Handmade samples, measurements and trial records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decoding.draft_length import DraftLengthRule, Fixed
from decoding.drafts import LayerSkip
from studies.contract import Candidate, TrialRecord, TrialState
from studies.measurement import Measurement, PromptSample


def sample(ratio: float, prompt: int = 0, **facts: Any) -> PromptSample:
    """Return a sample with a speed-up of `ratio` over plain decoding: 10 tokens, 5 rounds, 8 of 10 drafted tokens accepted."""
    values: dict[str, Any] = {
        "prompt": prompt,
        "plain_seconds": ratio,
        "plain_tokens": 10,
        "draft_seconds": 1.0,
        "draft_tokens": 10,
        "rounds": 5,
        "drafted": 10,
        "accepted": 8,
        "identical": True,
    }
    return PromptSample(**{**values, **facts})


def measurement(ratios: Sequence[float]) -> Measurement:
    """Return a measurement with one prompt for each ratio."""
    return Measurement(samples=tuple(sample(ratio, index) for index, ratio in enumerate(ratios)))


def candidate(blocks: Sequence[int] = (2, 3), rule: DraftLengthRule | None = None) -> Candidate:
    """Return a candidate that skips these blocks."""
    return Candidate(draft=LayerSkip.blocks(tuple(blocks)), draft_length=rule or Fixed(max_tokens=4))


def record(
    speedup: float | None = 1.2,
    *,
    study: str = "conf_layers",
    number: int = 0,
    blocks: Sequence[int] = (2, 3),
    **facts: Any,
) -> TrialRecord:
    """Return a complete trial with this speed-up, or a failed one if it has none."""
    values: dict[str, Any] = {
        "study": study,
        "number": number,
        "state": TrialState.FAIL if speedup is None else TrialState.COMPLETE,
        "candidate": candidate(blocks),
        "measurement": None if speedup is None else measurement([speedup, speedup]),
        "reason": "it broke" if speedup is None else None,
        "seconds": 1.5,
    }
    return TrialRecord(**{**values, **facts})
