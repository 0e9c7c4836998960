"""Draft-length rules, one file each, and their registry.

To add a rule, write one file with a `DraftLengthRule` and its `Controller`, and name the class in `RULES`. Profiles,
the command line and the `draft_length` study pick it up from the registry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from decoding.documents.strict_yaml import suggest
from decoding.draft_length.ada_edl import (
    AdaEdl,
    AdaEdlPublished,
    AdaptiveExit,
    AdaptiveThresholdRule,
    MaxConfidence,
)
from decoding.draft_length.beta_thompson import BetaThompson
from decoding.draft_length.contract import (
    Controller,
    CostAwareRule,
    Decision,
    DraftDistribution,
    DraftLengthRule,
    Looking,
    RoundCosts,
)
from decoding.draft_length.fixed import Fixed, TopProbability

RULES: dict[str, type[DraftLengthRule]] = {
    "fixed": Fixed,
    "top_probability": TopProbability,
    "ada_edl": AdaEdl,
    "ada_edl_published": AdaEdlPublished,
    "max_confidence": MaxConfidence,
    "adaptive_exit": AdaptiveExit,
    "beta_thompson": BetaThompson,
}

if TYPE_CHECKING:
    AnyRule = DraftLengthRule
else:
    AnyRule = Annotated[Union[tuple(RULES.values())], Field(discriminator="rule")]  # noqa: UP007 - built from the registry


def check_rules(rules: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names. Raises ValueError if one is not a rule."""
    for rule in rules:
        if rule not in RULES:
            raise ValueError(f"unknown rule {rule!r}; {suggest(rule, RULES)}")
    return rules


__all__ = [
    "RULES",
    "AdaEdl",
    "AdaEdlPublished",
    "AdaptiveExit",
    "AdaptiveThresholdRule",
    "AnyRule",
    "BetaThompson",
    "Controller",
    "CostAwareRule",
    "Decision",
    "DraftDistribution",
    "DraftLengthRule",
    "Fixed",
    "Looking",
    "MaxConfidence",
    "RoundCosts",
    "TopProbability",
    "check_rules",
]
