"""When to stop drafting, for a given draft: a search over AdaEDL, top probability and fixed lengths and their parameters.

The space is read off the rules themselves (`decoding.draft_length.RULES` and the search ranges declared there), so a new
rule is searched as soon as it is registered.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import optuna
from pydantic import Field, field_validator

from decoding.documents import Document, suggest
from decoding.draft_length import RULES, DraftLengthRule
from decoding.profile import LayerSkip
from studies.contract import Candidate, Problem, Study, TrialRecord, best_trials


class DraftLengthSettings(Document):
    """The settings of the draft-length search."""

    rules: tuple[str, ...] = Field(tuple(RULES), min_length=1, description="rules to choose among")
    num_drafts: int = Field(2, ge=1, description="how many of the best drafts found before to search with")
    draft: LayerSkip | None = Field(None, description="search for this draft instead of those found before")
    max_tokens: int = Field(16, ge=1, le=64, description="longest draft to consider (K)")
    max_trials: int = Field(40, ge=1, description="trials at most")
    patience: int = Field(15, ge=1, description="trials without a better speed-up after which the search ends")

    @field_validator("rules")
    @classmethod
    def _rules_exist(cls, rules: tuple[str, ...]) -> tuple[str, ...]:
        for rule in rules:
            if rule not in RULES:
                raise ValueError(f"unknown rule {rule!r}; {suggest(rule, RULES)}")
        return rules


class DraftLength(Study):
    """TPE over draft, rule and the rule's parameters, begun with each rule's defaults on the best draft."""

    name: ClassVar[str] = "draft_length"
    Settings: ClassVar[type[Document]] = DraftLengthSettings

    def __init__(self, problem: Problem, settings: DraftLengthSettings) -> None:
        self._problem = problem
        self._settings = settings
        before = _best_before(problem, settings)
        self._drafts = [candidate.draft for candidate in before]
        self._incumbent = [candidate.draft_length for candidate in before[:1]]
        self._num_trials = 0
        self._best = 0.0
        self._last_improvement = 0

    @classmethod
    def create(cls, problem: Problem, settings: Any) -> DraftLength:
        """See `Study.create`."""
        return cls(problem, settings)

    def sampler(self) -> optuna.samplers.BaseSampler:
        """TPE that treats the parameters of each rule as one group."""
        with warnings.catch_warnings():
            # `group` is marked experimental; a sampler that lost it would search worse, not wrongly.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.TPESampler(
                seed=self._problem.seed, multivariate=True, group=True, n_startup_trials=8
            )

    def space(self) -> dict[str, Any]:
        """Rules, lengths and drafts; another limit or patience is the same search, going on longer."""
        settings = self._settings.model_dump(mode="json", exclude={"max_trials", "patience"})
        return {**settings, "drafts": [draft.model_dump(mode="json") for draft in self._drafts]}

    def starts(self) -> list[dict[str, Any]]:
        """On the best draft, the rule it was found with, then each rule's defaults."""
        defaults = [self._parameters(RULES[rule](rule=rule)) for rule in self._settings.rules]
        incumbent = [self._parameters(rule) for rule in self._incumbent if rule.rule in self._settings.rules]
        starts = [{"draft": 0, **parameters} for parameters in [*incumbent, *defaults]]
        return [start for place, start in enumerate(starts) if start not in starts[:place]]

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """A draft, a rule and its parameters, as Optuna suggests them."""
        place = trial.suggest_categorical("draft", list(range(len(self._drafts))))
        name = trial.suggest_categorical("rule", list(self._settings.rules))
        rule = RULES[name](rule=name, **self._suggest(trial, name))
        return Candidate(draft=self._drafts[place], draft_length=rule), {"draft_rank": place}

    def observe(self, record: TrialRecord) -> None:
        """Count trials since the last improvement; what to try next is the sampler's business."""
        self._num_trials += 1
        if record.speedup is not None and record.speedup > self._best:
            self._best, self._last_improvement = record.speedup, self._num_trials

    def finished(self) -> str | None:
        """No draft to search for, the trial limit, or `patience` trials without a better speed-up."""
        if not self._drafts:
            return (
                "there is no draft to search a length for: run conf_layers before it, or set `draft:` under "
                "`studies: draft_length`"
            )
        if self._num_trials >= self._settings.max_trials:
            return f"{self._num_trials} trials done"
        idle = self._num_trials - self._last_improvement
        return f"no better draft length in {idle} trials" if idle >= self._settings.patience else None

    def _suggest(self, trial: optuna.Trial, name: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for field, (low, high, log) in search_ranges(RULES[name], self._settings.max_tokens).items():
            parameter = f"{name}.{field}"
            if field == "max_tokens":
                values[field] = trial.suggest_int(parameter, int(low), int(high))
            else:
                values[field] = trial.suggest_float(parameter, low, high, log=log)
        return values

    def _parameters(self, rule: DraftLengthRule) -> dict[str, Any]:
        """The rule as Optuna parameters, moved into the range that is searched."""
        ranges = search_ranges(type(rule), self._settings.max_tokens)
        clipped = {field: min(max(getattr(rule, field), low), high) for field, (low, high, _) in ranges.items()}
        return {"rule": rule.rule, **{f"{rule.rule}.{field}": value for field, value in clipped.items()}}


def search_ranges(rule: type[DraftLengthRule], max_tokens: int) -> dict[str, tuple[float, float, bool]]:
    """(low, high, logarithmic) of each tunable parameter of a rule; the draft length reaches to `max_tokens`."""
    ranges = {}
    for name, field in rule.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and isinstance(search := extra.get("search"), dict):
            high = float(max_tokens) if name == "max_tokens" else float(search["high"])  # type: ignore[arg-type]
            ranges[name] = (float(search["low"]), high, bool(search["log"]))  # type: ignore[arg-type]
    return ranges


def _best_before(problem: Problem, settings: DraftLengthSettings) -> list[Candidate]:
    """The best candidates of the studies before, each draft once; or the given draft."""
    if settings.draft is not None:
        return [Candidate(draft=settings.draft, draft_length=RULES[settings.rules[0]](rule=settings.rules[0]))]
    earlier = [record for records in problem.earlier.values() for record in records]
    best = best_trials(earlier, settings.num_drafts, same=lambda candidate: candidate.draft.model_dump_json())
    return [record.candidate for record in best]
