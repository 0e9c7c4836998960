"""The space of draft-length rules as Optuna parameters, read off the rules themselves.

A rule declares beside each parameter the range worth searching, so a new one is searched as soon as it is registered.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import optuna
from pydantic import AfterValidator, Field

from decoding.documents.strict_yaml import suggest
from decoding.draft_length import RULES, DraftLengthRule


def rule_sampler(seed: int) -> optuna.samplers.BaseSampler:
    """TPE that treats the parameters of each rule as one group."""
    with warnings.catch_warnings():
        # `group` is marked experimental; a sampler that lost it would search worse, not wrongly.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=8)


def suggest_rule(trial: optuna.Trial, rules: Sequence[str], max_tokens: int) -> DraftLengthRule:
    """A rule and its parameters, as the sampler suggests them; drafts reach to `max_tokens`."""
    name = trial.suggest_categorical("rule", list(rules))
    values: dict[str, Any] = {}
    for field, (low, high, log) in search_ranges(RULES[name], max_tokens).items():
        parameter = f"{name}.{field}"
        if field == "max_tokens":
            values[field] = trial.suggest_int(parameter, int(low), int(high))
        else:
            values[field] = trial.suggest_float(parameter, low, high, log=log)
    return RULES[name](rule=name, **values)


def rule_parameters(rule: DraftLengthRule, max_tokens: int) -> dict[str, Any]:
    """The rule as Optuna parameters, moved into the range that is searched: what to enqueue for `suggest_rule` to find it."""
    ranges = search_ranges(type(rule), max_tokens)
    clipped = {field: min(max(getattr(rule, field), low), high) for field, (low, high, _) in ranges.items()}
    return {"rule": rule.rule, **{f"{rule.rule}.{field}": value for field, value in clipped.items()}}


def draw_rule(name: str, max_tokens: int, stream: np.random.Generator) -> DraftLengthRule:
    """A rule with parameters drawn evenly from the ranges that are searched."""
    return _rule_at(
        name, max_tokens, {field: float(stream.random()) for field in search_ranges(RULES[name], max_tokens)}
    )


def near_rule(rule: DraftLengthRule, max_tokens: int, nearness: float, stream: np.random.Generator) -> DraftLengthRule:
    """The rule with its parameters moved at random, by a standard deviation of `nearness` of the range that is searched."""
    places = {}
    for field, (low, high, log) in search_ranges(type(rule), max_tokens).items():
        value = getattr(rule, field)
        place = math.log(value / low) / math.log(high / low) if log else (value - low) / ((high - low) or 1.0)
        places[field] = float(np.clip(place + stream.normal(0.0, nearness), 0.0, 1.0))
    return _rule_at(rule.rule, max_tokens, places)


def _rule_at(name: str, max_tokens: int, places: dict[str, float]) -> DraftLengthRule:
    """The rule whose parameters lie at these places, 0 to 1, of their ranges."""
    values: dict[str, float] = {}
    for field, (low, high, log) in search_ranges(RULES[name], max_tokens).items():
        value = low * (high / low) ** places[field] if log else low + (high - low) * places[field]
        values[field] = round(value) if field == "max_tokens" else value
    return RULES[name](rule=name, **values)


def search_ranges(rule: type[DraftLengthRule], max_tokens: int) -> dict[str, tuple[float, float, bool]]:
    """(low, high, logarithmic) of each tunable parameter of a rule; the draft length reaches to `max_tokens`."""
    ranges = {}
    for name, field in rule.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and isinstance(search := extra.get("search"), dict):
            high = float(max_tokens) if name == "max_tokens" else float(search["high"])  # type: ignore[arg-type]
            ranges[name] = (float(search["low"]), high, bool(search["log"]))  # type: ignore[arg-type]
    return ranges


def check_rules(rules: tuple[str, ...]) -> tuple[str, ...]:
    """The names, if all are rules; ValueError otherwise."""
    for rule in rules:
        if rule not in RULES:
            raise ValueError(f"unknown rule {rule!r}; {suggest(rule, RULES)}")
    return rules


RuleNames = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(check_rules)]
"""The key of a study's settings that names the rules to choose among."""
