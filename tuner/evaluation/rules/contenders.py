"""The rules that are compared, by label: fixed lengths, every rule, and rules that other prompts have warmed up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from decoding.draft_length import RULES, AdaptiveThresholdRule, CostAwareRule, DraftLengthRule, Fixed
from tuner.evaluation.rules.settings import RulesEvaluation

WarmUp = Callable[[DraftLengthRule], DraftLengthRule]
"""Returns a rule after the warm-up prompts."""


def rules_to_compare(settings: RulesEvaluation, own: DraftLengthRule, warm_up: WarmUp) -> dict[str, DraftLengthRule]:
    """Return all fixed lengths, then the asked rules with each longest draft, then the profile's `own` rule if it is another."""
    lengths = sorted(set(settings.max_tokens))
    rules: dict[str, DraftLengthRule] = {f"fixed {n}": Fixed(max_tokens=n) for n in range(1, lengths[-1] + 1)}
    for length in lengths:
        suffix = f", K {length}" if len(lengths) > 1 else ""
        for name in settings.rules:
            for label, rule in _settings_of(name, length, settings.initial_thresholds, warm_up):
                rules[f"{label}{suffix}"] = rule
    if own not in rules.values():
        rules["the profile's own"] = own
    return rules


def _settings_of(
    name: str, length: int, thresholds: Sequence[float], warm_up: WarmUp
) -> Iterator[tuple[str, DraftLengthRule]]:
    """Yield the labelled settings of one rule: at its defaults, or from each threshold, and warmed up."""
    rule = RULES[name](rule=name, max_tokens=length)
    if isinstance(rule, AdaptiveThresholdRule) and thresholds:
        yield from ((f"{name} from {start:g}", rule.starting_at(start)) for start in thresholds)
        return
    yield name, rule
    if isinstance(rule, CostAwareRule):
        yield f"{name}, warm", warm_up(rule)
