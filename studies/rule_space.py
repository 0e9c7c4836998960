"""The space of draft-length rules as Optuna parameters, read from the rules themselves.

A rule declares the search range of each parameter, so a new rule is searched as soon as it is registered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from optuna.trial import BaseTrial
from pydantic import AfterValidator, Field

from decoding.documents.strict_yaml import Document
from decoding.draft_length import RULES, DraftLengthRule, check_rules

DEFAULT_RULES = tuple(name for name in RULES if name not in ("ada_edl_published", "max_confidence"))
"""Rules among which searches choose unless told otherwise: all but the forms that drop a token whose draft pass has run."""


def suggest_rule(trial: BaseTrial, rules: Sequence[str], max_tokens: int) -> DraftLengthRule:
    """Return a rule with parameters that the sampler suggests; drafts have at most `max_tokens` tokens."""
    name = trial.suggest_categorical("rule", list(rules))
    values: dict[str, Any] = {}
    for field, (low, high, log) in search_ranges(RULES[name], max_tokens).items():
        parameter = f"{name}.{field}"
        if field == "max_tokens":
            values[field] = trial.suggest_int(parameter, int(low), int(high))
        else:
            values[field] = trial.suggest_float(parameter, low, high, log=log)
    return RULES[name](rule=name, **values)


def declare_rule(trial: BaseTrial, rule: DraftLengthRule) -> None:
    """Record the parameters of a rule that is not chosen: each has one value."""
    trial.suggest_categorical("rule", [rule.rule])
    for field in search_ranges(type(rule), rule.max_tokens):
        value = getattr(rule, field)
        suggest = trial.suggest_int if field == "max_tokens" else trial.suggest_float
        suggest(f"{rule.rule}.{field}", value, value)


def rule_parameters(rule: DraftLengthRule, max_tokens: int) -> dict[str, Any]:
    """Return the rule as Optuna parameters for `enqueue_trial`, clipped to the search ranges."""
    ranges = search_ranges(type(rule), max_tokens)
    clipped = {field: min(max(getattr(rule, field), low), high) for field, (low, high, _) in ranges.items()}
    return {"rule": rule.rule, **{f"{rule.rule}.{field}": value for field, value in clipped.items()}}


def draw_rule(name: str, max_tokens: int, stream: np.random.Generator) -> DraftLengthRule:
    """Return a rule with parameters drawn uniformly from the search ranges."""
    return _rule_at(
        name, max_tokens, {field: float(stream.random()) for field in search_ranges(RULES[name], max_tokens)}
    )


def near_rule(rule: DraftLengthRule, max_tokens: int, nearness: float, stream: np.random.Generator) -> DraftLengthRule:
    """Return the rule with parameters moved at random, by a standard deviation of `nearness` of their search range."""
    fractions = {}
    for field, (low, high, log) in search_ranges(type(rule), max_tokens).items():
        value = getattr(rule, field)
        fraction = math.log(value / low) / math.log(high / low) if log else (value - low) / ((high - low) or 1.0)
        fractions[field] = float(np.clip(fraction + stream.normal(0.0, nearness), 0.0, 1.0))
    return _rule_at(rule.rule, max_tokens, fractions)


def _rule_at(name: str, max_tokens: int, fractions: dict[str, float]) -> DraftLengthRule:
    """Return the rule with parameters at these fractions, 0 to 1, of their search ranges."""
    values: dict[str, float] = {}
    for field, (low, high, log) in search_ranges(RULES[name], max_tokens).items():
        value = low * (high / low) ** fractions[field] if log else low + (high - low) * fractions[field]
        values[field] = round(value) if field == "max_tokens" else value
    return RULES[name](rule=name, **values)


def search_ranges(rule: type[DraftLengthRule], max_tokens: int) -> dict[str, tuple[float, float, bool]]:
    """Return (low, high, logarithmic) of each tunable parameter of a rule; `max_tokens` bounds the draft length."""
    ranges = {}
    for name, field in rule.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and isinstance(search := extra.get("search"), dict):
            high = float(max_tokens) if name == "max_tokens" else float(search["high"])  # type: ignore[arg-type]
            ranges[name] = (float(search["low"]), high, bool(search["log"]))  # type: ignore[arg-type]
    return ranges


def rules_within(settings: Document, possible: Sequence[str]) -> tuple[str, ...]:
    """Return the rules of a study's settings that are `possible`; all possible ones if its default has none of them.

    Raises ValueError for a rule that the user asked for and that is not.
    """
    asked: tuple[str, ...] = settings.rules  # type: ignore[attr-defined]
    wrong = [name for name in asked if name not in possible]
    if wrong and "rules" in settings.model_fields_set:
        raise ValueError(f"rules: the engine does not run {', '.join(wrong)}: it runs {', '.join(possible)}")
    return tuple(name for name in asked if name in possible) or tuple(possible)


RuleNames = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(check_rules)]
"""Settings key of a study: the rules to choose among."""
