"""The search over exit layers: where to exit, with or without a head, and when to stop drafting.

Our formulation, after the abstract of EESD (arXiv 2406.03853), from which the paper is known to us. A forecast orders all exits
at the cost of one pass over the tuning sequences. Real decoding then measures the promising exits, their neighbours, and plain
decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import optuna
from pydantic import Field, TypeAdapter

from decoding.draft_length import RULES, Fixed
from decoding.drafts import EarlyExit, Layers, PlainDecoding
from decoding.target import Target
from studies.contract import Candidate, Problem, Study, StudySettings, StudySetup, TrialRecord
from studies.rule_space import DEFAULT_RULES, RuleNames, rule_parameters, rule_sampler, rules_within, suggest_rule
from studies.searches.exit_forecast import ExitForecast, forecast_exits
from studies.searches.exits import check_exits, exits_with_head

NOTHING = "draft nothing"
"""The choice of plain decoding, beside the exits."""
KEPT_FORECASTS = "forecasts"


class ExitLayerSettings(StudySettings):
    """Settings of the search over exits."""

    exit_layers: Layers | None = Field(
        None, min_length=1, description="exits to consider; default: all, with heads for up to 12 of them"
    )
    heads: tuple[Literal["none", "block"], ...] = Field(
        ("none", "block"), min_length=1, description="without a head, with a distilled one"
    )
    rules: RuleNames = Field(DEFAULT_RULES, description="draft-length rules to choose among")
    max_tokens: int = Field(12, ge=1, le=64, description="longest draft to consider (K)")
    num_promising: int = Field(4, ge=1, description="exits of the best forecasts to measure, each with its neighbours")

    def for_engine(self, rules: Sequence[str], *, quantises: bool) -> dict[str, Any]:
        """Return the rules that the engine runs."""
        return {"rules": rules_within(self, rules)}

    def check(self, target: Target) -> None:
        """Raise ValueError for an exit that the model does not have."""
        check_exits(self.exit_layers, target)

    def wanted_heads(self, num_layers: int) -> tuple[int, ...]:
        """Return the exit layers that need a distilled head."""
        return exits_with_head(self.exit_layers, num_layers) if "block" in self.heads else ()


class ExitLayer(Study):
    """TPE over exit, rule and the rule's parameters, starting from the best forecasts."""

    name = "exit_layer"
    Settings = ExitLayerSettings

    def __init__(
        self,
        problem: Problem,
        settings: ExitLayerSettings,
        forecasts: Sequence[ExitForecast],
    ) -> None:
        super().__init__(problem, settings)
        self._forecasts = list(forecasts)
        exits = promising(self._forecasts, settings.num_promising)
        exits.sort(key=lambda each: (each.draft.exit_layer, each.draft.head is not None))
        self._choices = {_name(each.draft): each for each in exits}
        self._best: TrialRecord | None = None

    @classmethod
    def create(cls, problem: Problem, settings: Any, kept: Any = None) -> ExitLayer:
        """Return the study with a forecast of every exit, or with the forecasts that were kept."""
        if kept is not None:
            return cls(problem, settings, _FORECASTS.validate_python(kept[KEPT_FORECASTS]))
        drafts = _drafts(problem, settings)
        return cls(problem, settings, forecast_exits(problem, drafts, settings.max_tokens) if drafts else [])

    def setup(self) -> StudySetup:
        """Return the setup; the space holds the exit heads that exist now.

        The forecasts are kept because their costs are measured: a second forecast might order the exits differently.
        """
        head_files = {draft.head: draft.head_sha256 for draft in _drafts(self.problem, self.settings) if draft.head}
        return StudySetup(
            space={**self.settings.identity(), "head_files": head_files},
            sampler=rule_sampler(self.problem.seed),
            starts=self._starts(),
            kept={KEPT_FORECASTS: _FORECASTS.dump_python(self._forecasts, mode="json")},
        )

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """Return an exit, a rule and its parameters, as Optuna suggests them; the notes hold the forecast."""
        choice = trial.suggest_categorical("exit", [NOTHING, *self._choices])
        if choice == NOTHING:
            return Candidate(draft=PlainDecoding(), draft_length=Fixed()), {}
        forecast = self._choices[choice]
        rule = suggest_rule(trial, self.settings.rules, self.settings.max_tokens)
        notes = {
            "predicted_speedup": round(forecast.speedup, 4),
            "predicted_agreement": round(forecast.agreement, 4),
            "predicted_acceptance": round(forecast.acceptance, 4),
        }
        return Candidate(draft=forecast.draft, draft_length=rule), notes

    def proposes_beside(self, pending: Sequence[Candidate]) -> bool:
        """Return True: Optuna's TPE counts running trials as slow ones ("constant liar")."""
        return True

    def observe(self, record: TrialRecord) -> None:
        """Remember the best trial; the sampler decides what to try next."""
        best = self._best.speedup if self._best is not None else 0.0
        if record.speedup is not None and record.repeat_of is None and record.speedup > (best or 0.0):
            self._best = record

    def finished(self) -> str | None:
        """Return a reason if there is no exit to search."""
        if self._forecasts:
            return None
        return "there is no exit to search: no head was found, and exits without a head are not asked for"

    def remarks(self) -> list[str]:
        """Return a remark if the best exit is at an edge of those considered and the model has exits beyond it."""
        if self._best is None:
            return []
        best = self._best.candidate.draft
        draft = next((forecast.draft for forecast in self._forecasts if forecast.draft == best), None)
        if draft is None:
            return []
        same_kind = [f.draft.exit_layer for f in self._forecasts if (f.draft.head is None) == (draft.head is None)]
        edges = {min(same_kind): "lowest", max(same_kind): "highest"}
        of_model = (1, self.problem.target.num_layers - 1)
        if draft.exit_layer not in edges or draft.exit_layer in of_model or len(same_kind) == 1:
            return []
        return [
            f"the best exit, {draft.exit_layer}, is the {edges[draft.exit_layer]} that was considered "
            f"{'without a head' if draft.head is None else 'with a head'}: a better one may lie beyond (exit_layers)"
        ]

    def _starts(self) -> list[dict[str, Any]]:
        """Return the best forecast, plain decoding, the other promising exits, then each rule's defaults on the best exit."""
        best_first = sorted(self._choices.values(), key=lambda forecast: -forecast.speedup)
        starts = [self._start(forecast) for forecast in best_first[: self.settings.num_promising]]
        starts.insert(1, {"exit": NOTHING})
        if best_first:
            first = _name(best_first[0].draft)
            rules = [RULES[name](rule=name) for name in self.settings.rules if name != "fixed"]
            starts += [{"exit": first, **rule_parameters(rule, self.settings.max_tokens)} for rule in rules]
        starts += [self._start(forecast) for forecast in best_first[self.settings.num_promising :]]
        return [start for index, start in enumerate(starts) if start not in starts[:index]]

    def _start(self, forecast: ExitForecast) -> dict[str, Any]:
        """Return the exit with its best forecast rule, or with the first of the settings' rules."""
        rule = forecast.rule
        if rule.rule not in self.settings.rules:
            rule = RULES[self.settings.rules[0]](rule=self.settings.rules[0])
        return {"exit": _name(forecast.draft), **rule_parameters(rule, self.settings.max_tokens)}


def promising(forecasts: list[ExitForecast], count: int) -> list[ExitForecast]:
    """Return the first `count` of forecasts sorted best first, and their neighbours among the exits of the same kind."""
    chosen = forecasts[:count]
    for has_head in (False, True):
        kind = [forecast for forecast in forecasts if (forecast.draft.head is not None) == has_head]
        by_layer = sorted(kind, key=lambda forecast: forecast.draft.exit_layer)
        for index, forecast in enumerate(by_layer):
            beside = by_layer[max(0, index - 1) : index + 2]
            if forecast not in chosen and any(near in forecasts[:count] for near in beside):
                chosen = [*chosen, forecast]
    return chosen


_FORECASTS = TypeAdapter(list[ExitForecast])


def _drafts(problem: Problem, settings: ExitLayerSettings) -> list[EarlyExit]:
    """Return the exits to consider, without a head and with the heads that exist."""
    exit_layers = settings.exit_layers or tuple(range(1, problem.target.num_layers))
    drafts = [EarlyExit(exit_layer=layer) for layer in exit_layers if "none" in settings.heads]
    if "block" in settings.heads:
        drafts += [problem.head_drafts[layer] for layer in exit_layers if layer in problem.head_drafts]
    return drafts


def _name(draft: EarlyExit) -> str:
    """Return the exit as a value of a parameter, as Optuna's dashboard shows it."""
    return f"layer {draft.exit_layer}, {'trained head' if draft.head else 'no head'}"
