"""EESD's exit layer N (arXiv 2406.03853): behind how many blocks to exit, with or without a head, and when to stop drafting.

The paper is known to us by its abstract; the search is our formulation. A forecast orders all exits at the cost of one pass
over the tuning texts; real decoding measures the promising ones, their neighbours, and drafting nothing at all.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import optuna
from pydantic import Field, TypeAdapter

from decoding.documents.strict_yaml import Document
from decoding.draft_length import RULES, Fixed
from decoding.drafts import EarlyExit, Layers, PlainDecoding
from decoding.target import Target
from studies.contract import Candidate, Problem, Study, TrialRecord
from studies.rule_space import RuleNames, rule_parameters, rule_sampler, suggest_rule
from studies.searches.exit_forecast import ExitForecast, forecast_exits
from studies.searches.exits import check_exits, exits_with_head

NOTHING = "draft nothing"
"""The choice beside the exits."""


class ExitLayerSettings(Document):
    """The settings of the search over exits."""

    exit_layers: Layers | None = Field(
        None, min_length=1, description="exits to consider; default: all, with heads for up to 12 of them"
    )
    heads: tuple[Literal["none", "block"], ...] = Field(
        ("none", "block"), min_length=1, description="without a head, with a distilled one"
    )
    rules: RuleNames = Field(tuple(RULES), description="draft-length rules to choose among")
    max_tokens: int = Field(12, ge=1, le=64, description="longest draft to consider (K)")
    num_promising: int = Field(4, ge=1, description="exits of the best forecasts to measure, each with its neighbours")
    max_trials: int = Field(40, ge=1, description="trials at most")
    patience: int = Field(15, ge=1, description="trials without a better speed-up after which the search ends")


class ExitLayer(Study):
    """TPE over exit, rule and the rule's parameters, begun with the best forecasts."""

    name: ClassVar[str] = "exit_layer"
    Settings: ClassVar[type[Document]] = ExitLayerSettings

    def __init__(self, problem: Problem, settings: ExitLayerSettings, forecasts: list[ExitForecast]) -> None:
        self._problem = problem
        self._settings = settings
        self._forecasts = forecasts
        self._choices = {_label(forecast.draft): forecast for forecast in promising(forecasts, settings.num_promising)}
        self._num_trials = 0
        self._best: TrialRecord | None = None
        self._last_improvement = 0

    @classmethod
    def create(cls, problem: Problem, settings: Any) -> ExitLayer:
        """Forecast every exit, or take the forecast that was kept."""
        if problem.kept is not None:
            return cls(problem, settings, _FORECASTS.validate_python(problem.kept))
        drafts = _drafts(problem, settings)
        return cls(problem, settings, forecast_exits(problem, drafts, settings.max_tokens) if drafts else [])

    @classmethod
    def check(cls, settings: Any, target: Target) -> None:
        """Raise ValueError for an exit that the model does not have."""
        check_exits(settings.exit_layers, target)

    @classmethod
    def wanted_heads(cls, settings: Any, num_layers: int) -> tuple[int, ...]:
        """The exits to have a distilled head for."""
        return () if "block" not in settings.heads else exits_with_head(settings.exit_layers, num_layers)

    def keep(self) -> Any:
        """The forecasts: their costs are measured, so a second forecast might have another order."""
        return _FORECASTS.dump_python(self._forecasts, mode="json")

    def sampler(self) -> optuna.samplers.BaseSampler:
        """See `rule_sampler`."""
        return rule_sampler(self._problem.seed)

    def space(self) -> dict[str, Any]:
        """Exits, the heads that are there now, and rules; another limit or patience is the same search, going on longer."""
        settings = self._settings.model_dump(mode="json", exclude={"max_trials", "patience"})
        drafts = _drafts(self._problem, self._settings)
        return {**settings, "head_files": {draft.head: draft.head_sha256 for draft in drafts if draft.head}}

    def starts(self) -> list[dict[str, Any]]:
        """The best forecast, nothing, the other promising exits, then every rule's defaults on the best exit."""
        best_first = sorted(self._choices.values(), key=lambda forecast: -forecast.speedup)
        starts = [self._start(forecast) for forecast in best_first[: self._settings.num_promising]]
        starts.insert(1, {"exit": NOTHING})
        if best_first:
            first = _label(best_first[0].draft)
            rules = [RULES[name](rule=name) for name in self._settings.rules if name != "fixed"]
            starts += [{"exit": first, **rule_parameters(rule, self._settings.max_tokens)} for rule in rules]
        starts += [self._start(forecast) for forecast in best_first[self._settings.num_promising :]]
        return [start for place, start in enumerate(starts) if start not in starts[:place]]

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """An exit, a rule and its parameters, as Optuna suggests them; with what was forecast of the exit."""
        choice = trial.suggest_categorical("exit", [NOTHING, *sorted(self._choices)])
        if choice == NOTHING:
            return Candidate(draft=PlainDecoding(), draft_length=Fixed()), {}
        forecast = self._choices[choice]
        rule = suggest_rule(trial, self._settings.rules, self._settings.max_tokens)
        notes = {
            "predicted_speedup": round(forecast.speedup, 4),
            "predicted_agreement": round(forecast.agreement, 4),
            "predicted_acceptance": round(forecast.acceptance, 4),
        }
        return Candidate(draft=forecast.draft, draft_length=rule), notes

    def observe(self, record: TrialRecord) -> None:
        """Count trials since the last improvement; what to try next is the sampler's business."""
        self._num_trials += 1
        best = self._best.speedup if self._best is not None else 0.0
        if record.speedup is not None and record.repeat_of is None and record.speedup > (best or 0.0):
            self._best, self._last_improvement = record, self._num_trials

    def finished(self) -> str | None:
        """No exit to search, the trial limit, or `patience` trials without a better speed-up."""
        if not self._forecasts:
            return "there is no exit to search: no head was found, and exits without a head are not asked for"
        if self._num_trials >= self._settings.max_trials:
            return f"{self._num_trials} trials done"
        idle = self._num_trials - self._last_improvement
        return f"no better exit in {idle} trials" if idle >= self._settings.patience else None

    def _start(self, forecast: ExitForecast) -> dict[str, Any]:
        """The exit with the rule it is forecast to do best with, or with the first of those asked for."""
        rule = forecast.rule
        if rule.rule not in self._settings.rules:
            rule = RULES[self._settings.rules[0]](rule=self._settings.rules[0])
        return {"exit": _label(forecast.draft), **rule_parameters(rule, self._settings.max_tokens)}

    def remarks(self) -> list[str]:
        """Whether the best exit lies at the edge of those considered, with others of the model beyond."""
        if self._best is None or not isinstance(draft := self._best.candidate.draft, EarlyExit):
            return []
        same_kind = [f.draft.exit_layer for f in self._forecasts if (f.draft.head is None) == (draft.head is None)]
        ends = {min(same_kind): "lowest", max(same_kind): "highest"}
        of_model = (1, self._problem.target.num_layers - 1)
        if draft.exit_layer not in ends or draft.exit_layer in of_model or len(same_kind) == 1:
            return []
        return [
            f"the best exit, {draft.exit_layer}, is the {ends[draft.exit_layer]} that was considered "
            f"{'without a head' if draft.head is None else 'with a head'}: a better one may lie beyond (exit_layers)"
        ]


def promising(forecasts: list[ExitForecast], count: int) -> list[ExitForecast]:
    """The `count` best of forecasts that are sorted best first, and the neighbours of each among those of its kind."""
    chosen = forecasts[:count]
    for has_head in (False, True):
        kind = [forecast for forecast in forecasts if (forecast.draft.head is not None) == has_head]
        by_layer = sorted(kind, key=lambda forecast: forecast.draft.exit_layer)
        for place, forecast in enumerate(by_layer):
            beside = by_layer[max(0, place - 1) : place + 2]
            if forecast not in chosen and any(near in forecasts[:count] for near in beside):
                chosen = [*chosen, forecast]
    return chosen


_FORECASTS = TypeAdapter(list[ExitForecast])


def _drafts(problem: Problem, settings: ExitLayerSettings) -> list[EarlyExit]:
    """The exits to consider: all or those asked for, without a head and with those heads that are there."""
    exit_layers = settings.exit_layers or tuple(range(1, problem.target.num_layers))
    drafts = [EarlyExit(exit_layer=layer) for layer in exit_layers if "none" in settings.heads]
    if "block" in settings.heads:
        drafts += [problem.head_drafts[layer] for layer in exit_layers if layer in problem.head_drafts]
    return drafts


def _label(draft: EarlyExit) -> str:
    return f"{draft.exit_layer} {'block' if draft.head else 'none'}"
