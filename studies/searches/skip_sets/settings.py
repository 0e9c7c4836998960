"""The settings of the rival searches. Defaults are the authors', unless the description says otherwise."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from decoding.documents.strict_yaml import Document
from decoding.draft_length import AnyRule, TopProbability

MethodName = Literal["odd_layers", "random", "swift", "draft_verify", "tpe"]


class SwiftSettings(Document):
    """SWIFT's own settings (arXiv 2410.06916)."""

    window: int = Field(32, ge=1, description="tokens of a text that a candidate is asked to foretell (W)")
    num_texts: int = Field(
        4, ge=1, description="texts that every candidate is scored on (SWIFT: the one being written)"
    )
    bayes_interval: int = Field(25, ge=1, description="every such candidate comes from the Gaussian process")
    round_length: int = Field(25, ge=1, description="candidates scored before a set is measured, at most (ours)")
    until_better: bool = Field(
        True, description="measure a better match as soon as it is found, not only behind a whole round (ours)"
    )
    max_matchness: float = Field(0.95, gt=0.0, le=1.0, description="matchness above which the search ends")
    tolerance: int = Field(300, ge=1, description="candidates without a better matchness after which the search ends")
    max_candidates: int = Field(1000, ge=1, description="candidates at most")


class SkipSetsSettings(Document):
    """Which rival, and what all of them share."""

    method: MethodName = Field("swift", description="the search to run")
    skip_ratio: float = Field(
        0.45, gt=0.0, lt=1.0, description="share of the middle sublayers that random and swift leave out"
    )
    max_trials: int = Field(1000, ge=1, description="trials at most (Draft & Verify's number; give a budget)")
    patience: int | None = Field(
        None, ge=1, description="trials without a better speed-up after which the search ends; default: none"
    )
    draft_length: AnyRule = Field(
        default_factory=lambda: TopProbability(threshold=0.6, max_tokens=12),
        description="the rule every skip set is measured with (ours, that of conf_layers)",
    )
    swift: SwiftSettings = Field(default_factory=SwiftSettings, description="what only swift has")
