"""The search over exit layers: where to exit, with or without a head, and when to stop drafting.

Our formulation, after the abstract of EESD (arXiv 2406.03853), from which the paper is known to us. Every exit is predicted from
one pass over the tuning sequences and the cost table. The promising exits, their neighbours and plain decoding come first. TPE then
chooses among all exits and rules by the measured speed-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import optuna
from pydantic import Field

from decoding.draft_length import RULES
from decoding.drafts import Draft, EarlyExit, Layers
from decoding.target import Target
from studies.contract import Candidate, Problem, StudySettings
from studies.prediction.predictor import Predictor
from studies.prediction.predictors import Prediction
from studies.prediction.survey import Survey
from studies.rule_space import DEFAULT_RULES, RuleNames, rules_within
from studies.samplers.by_optuna import TpeOfRules
from studies.samplers.contract import enqueue_in_new
from studies.space import Parameters, Space, default_exit_layers


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

    def for_engine(self, rules: Sequence[str], *, quantises: bool, whole_blocks: bool) -> dict[str, Any]:
        """Return the rules that the engine runs."""
        return {"rules": rules_within(self, rules)}

    def check(self, target: Target) -> None:
        """Raise ValueError for an exit that the model does not have."""
        for exit_layer in self.exit_layers or ():
            target.check_exit_layer(exit_layer)

    def wanted_heads(self, num_layers: int) -> tuple[int, ...]:
        """Return the exit layers that need a distilled head."""
        return tuple(self.exit_layers or default_exit_layers(num_layers)) if "block" in self.heads else ()

    def exits(self, problem: Problem) -> list[EarlyExit]:
        """Return the exits to consider, without a head and with the heads that exist."""
        exit_layers = self.exit_layers or tuple(range(1, problem.target.num_layers))
        drafts = [EarlyExit(exit_layer=layer) for layer in exit_layers if "none" in self.heads]
        if "block" in self.heads:
            drafts += [problem.head_drafts[layer] for layer in exit_layers if layer in problem.head_drafts]
        return drafts


class ExitLayer(TpeOfRules):
    """TPE over exit, rule and the rule's parameters, starting from the best predictions."""

    name = "exit_layer"
    Settings = ExitLayerSettings
    space: Space

    def __init__(self, problem: Problem, settings: ExitLayerSettings) -> None:
        super().__init__(problem, settings)
        self._exits = settings.exits(problem)
        self.space = Space(problem.target, rules=settings.rules, max_tokens=settings.max_tokens, exits=self._exits)
        self.predictions: dict[Draft, Prediction] = {}
        """The best prediction of each exit, the best first."""

    def begin(self, study: optuna.Study) -> None:
        """Predict every exit, and enqueue the best. Raises ValueError if the problem does not give costs."""
        if self._exits:
            self.predictions = {each.draft: each for each in self._predictor().best_first(self._exits)}
        enqueue_in_new(study, self.starts())

    def _predictor(self) -> Predictor:
        problem, settings = self.problem, self.settings
        if problem.costs is None:
            raise ValueError(f"the study {self.name} needs the costs of model passes")
        predictor = Predictor(
            Survey(
                problem.target,
                problem.prompts,
                problem.continuations,
                decoding=problem.decoding,
                seed=problem.seed,
                heads=problem.heads,
                exits=self._exits,
                known=problem.known,
            ),
            problem.costs(settings.max_tokens),
            max_tokens=settings.max_tokens,
            decoding=problem.decoding,
            batch_size=problem.batch_size,
            accepts=problem.accepts,
        )
        predictor.record(self._exits)
        return predictor

    def notes(self, candidate: Candidate) -> dict[str, Any]:
        """Return the prediction of the exit."""
        predicted = self.predictions.get(candidate.draft)
        if predicted is None:
            return {}
        return {
            "predicted_speedup": round(predicted.speedup, 4),
            "predicted_agreement": round(predicted.agreement, 4),
            "predicted_acceptance": round(predicted.acceptance, 4),
        }

    def finished(self, study: optuna.Study) -> str | None:
        """Return a reason if there is no exit to search."""
        if self._exits:
            return super().finished(study)
        return "there is no exit to search: no head was found, and exits without a head are not asked for"

    def remarks(self) -> list[str]:
        """Return a remark if the best exit is at an edge of those considered and the model has exits beyond it."""
        best = next((draft for draft in self._exits if self.best and draft == self.best.candidate.draft), None)
        if best is None:
            return []
        same_kind = [draft.exit_layer for draft in self._exits if (draft.head is None) == (best.head is None)]
        edges = {min(same_kind): "lowest", max(same_kind): "highest"}
        of_model = (1, self.problem.target.num_layers - 1)
        if best.exit_layer not in edges or best.exit_layer in of_model or len(same_kind) == 1:
            return []
        return [
            f"the best exit, {best.exit_layer}, is the {edges[best.exit_layer]} that was considered "
            f"{'without a head' if best.head is None else 'with a head'}: a better one may lie beyond (exit_layers)"
        ]

    def starts(self) -> list[Parameters]:
        """Return the best prediction, plain decoding, the other promising exits, each rule's defaults on the best, neighbours."""
        asked, best_first = self.settings.rules, list(self.predictions.values())
        defaults = [RULES[name](rule=name) for name in asked]
        candidates = [
            Candidate(draft=each.draft, draft_length=each.rule if each.rule.rule in asked else defaults[0])
            for each in promising(best_first, self._exits, self.settings.num_promising)
        ]
        others = [candidates[0].with_rule(rule) for rule in defaults if rule.rule != "fixed"] if candidates else []
        count = self.settings.num_promising
        ordered = [*candidates[:1], Candidate.plain(), *candidates[1:count], *others, *candidates[count:]]
        return [self.space.parameters(candidate) for candidate in ordered]


def promising(best_first: Sequence[Prediction], exits: Sequence[EarlyExit], count: int) -> list[Prediction]:
    """Return the first `count` predictions, then those of their neighbours among the exits with a head, or without, best first."""
    chosen: set[Draft] = {prediction.draft for prediction in best_first[:count]}
    near: set[Draft] = set()
    for has_head in (False, True):
        of_kind = sorted(
            (each for each in exits if (each.head is not None) == has_head), key=lambda each: each.exit_layer
        )
        for index, draft in enumerate(of_kind):
            if chosen & set(of_kind[max(0, index - 1) : index + 2]):
                near.add(draft)
    return [*best_first[:count], *(each for each in best_first[count:] if each.draft in near)]
