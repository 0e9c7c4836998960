"""The settings of the skip-set searches. Defaults are the authors' unless the description says otherwise."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from decoding.documents.strict_yaml import Document, suggest
from decoding.draft_length import AnyRule
from decoding.target import Target
from studies.contract import StudySettings
from studies.searches.skip_sets.methods import METHODS, load_method


def check_method(name: str) -> str:
    """Return the name of a registered method. Raises ValueError for any other name."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; {suggest(name, METHODS)}")
    return name


class SwiftSettings(Document):
    """Settings of SWIFT alone (arXiv 2410.06916)."""

    window: int = Field(32, ge=1, description="tokens of a sequence that a candidate must predict (W)")
    num_texts: int = Field(
        4, ge=1, description="sequences that every candidate is scored on (SWIFT: the one being written)"
    )
    bayes_interval: int = Field(25, ge=1, description="every such candidate comes from the Gaussian process")
    round_length: int = Field(25, ge=1, description="candidates scored before a set is measured, at most (ours)")
    until_better: bool = Field(
        True, description="measure a better match as soon as it is found, not only after a whole round (ours)"
    )
    max_matchness: float = Field(0.95, gt=0.0, le=1.0, description="matchness above which the search ends")
    tolerance: int = Field(300, ge=1, description="candidates without a better matchness after which the search ends")
    max_candidates: int = Field(1000, ge=1, description="candidates at most")


class SkipSetsSettings(StudySettings):
    """The method, and the settings that all methods share."""

    method: Annotated[str, AfterValidator(check_method)] = Field("swift", description=f"one of {', '.join(METHODS)}")
    skip_ratio: float = Field(
        0.45, gt=0.0, lt=1.0, description="share of the middle sublayers that random and swift skip"
    )
    max_trials: int = Field(1000, ge=1, description="trials at most (Draft & Verify's number; give a budget)")
    patience: int | None = Field(
        None, ge=1, description="trials without a better speed-up after which the search ends; default: none"
    )
    draft_length: AnyRule | None = Field(
        None,
        description="draft-length rule that every skip set is measured with; default: Draft & Verify's adaptive exit for its "
        "own search, top_probability for the others (ours, as in conf_layers)",
    )
    swift: SwiftSettings = Field(default_factory=SwiftSettings, description="settings of swift alone")

    def identity(self) -> dict[str, Any]:
        """Return the settings without limits, SWIFT's own included."""
        limits: dict[str, Any] = {
            "max_trials": True,
            "patience": True,
            "swift": {"max_matchness", "tolerance", "max_candidates"},
        }
        return self.model_dump(mode="json", exclude=limits)

    def check(self, target: Target) -> None:
        """Raise ValueError for a model with no block, or no single sublayers, to skip."""
        if target.num_layers < 3:
            raise ValueError(
                f"a model of {target.num_layers} layers has no block between the first and the last to leave out"
            )
        method = load_method(self.method)
        if not method.whole_blocks and None in (*target.anatomy.attention, *target.anatomy.mlp):
            raise ValueError(
                f"{self.method} leaves out single sublayers, but this model has blocks without separate attention and "
                "MLP modules; odd_layers leaves out whole blocks"
            )
        method.check(self, target)
