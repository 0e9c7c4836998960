"""ConfLayers with its settings tuned by Optuna: lambda's start and step, window, least skipped share, confidence, stop threshold.

The search is our formulation around ConfLayers (arXiv 2604.14612); see `conf_layers` for the published one. The published settings
are the first trial.

`conf_layers` moves lambda from trial to trial. Here each trial runs the whole schedule: it reads the confidences once, from the
continuations of a few tuning prompts together, and moves lambda from its start by its step until neither too few nor far too many
blocks are selected. A trial thus depends on its parameters alone: it is pruned, repeated and resumed like any other, and TPE can
learn from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import optuna
from optuna.trial import BaseTrial
from pydantic import Field

from decoding.drafts import LayerSkip, compact_indices
from decoding.target import Target
from studies.confidence.confidences import CONFIDENCE_NAMES, ConfidenceName, Excerpt, joint_scores
from studies.confidence.selection import Form
from studies.contract import ORIGIN, Candidate, Problem, StudySettings, TrialRecord
from studies.rule_space import RuleNames, rule_parameters, rules_within, suggest_rule
from studies.samplers.by_optuna import TpeOfRules
from studies.samplers.conf_layers import (
    CHAIN_ONLY,
    ConfLayersSettings,
    check_target,
    continued_texts,
    schedule_for,
)
from studies.samplers.contract import enqueue_in_new

PUBLISHED = ConfLayersSettings()
"""The settings of the released code."""
LAMBDAS = (-1.0, 1.0)  # the published sweep goes to 4; beyond 1 the least share moves lambda back
STEPS = (0.01, 0.2)
WINDOWS = (8, 128)
SKIP_RATIOS = (0.1, 0.7)


class ConfLayersTunedSettings(StudySettings):
    """Settings of the search over ConfLayers' own settings."""

    form: Form = Field("published", description="arithmetic and context of a selection, as in conf_layers")
    confidences: tuple[ConfidenceName, ...] = Field(
        CONFIDENCE_NAMES, min_length=1, description="confidence measures to choose among"
    )
    num_texts: int = Field(
        4, ge=1, description="tuning prompts on whose continuations confidences are read, their mean is used"
    )
    rules: RuleNames = Field(("top_probability",), description="draft-length rules to choose among")
    max_tokens: int = Field(25, ge=1, le=64, description="longest draft to consider (K)")
    window_growth_cap: int | None = Field(
        None, ge=0, description="cap of A in the adaptive threshold; default: L // 3 for Qwen models, as in the code"
    )

    def for_engine(self, rules: Sequence[str], *, quantises: bool, whole_blocks: bool) -> dict[str, Any]:
        """Return the rules that the engine runs."""
        return {"rules": rules_within(self, rules)}

    def check(self, target: Target) -> None:
        """See `check_target`."""
        check_target(target)


class TunedSpace:
    """The settings of ConfLayers and the rules: the set where the schedule rests follows from them.

    Confidences are read from the continuations of the first tuning prompts, once per trial.
    """

    def __init__(self, problem: Problem, settings: ConfLayersTunedSettings) -> None:
        self._target, self._settings = problem.target, settings
        self.texts = continued_texts(problem)[: settings.num_texts]
        # A wider window than the longest continuation is that continuation again.
        longest = max((len(continuation) for _, continuation in self.texts), default=1)
        self.windows = min(WINDOWS[0], longest), min(WINDOWS[1], longest)
        self.notes: dict[str, Any] = {}
        """What led to the candidate that was suggested last."""

    def identity(self) -> dict[str, Any]:
        """Return nothing: the settings and the texts of the search say all."""
        return {}

    def suggest(self, trial: BaseTrial) -> Candidate:
        """Return the set where the suggested schedule rests, and the suggested rule; plain decoding if the set is empty."""
        settings = self._settings
        name = cast("ConfidenceName", trial.suggest_categorical("confidence", settings.confidences))
        lam = trial.suggest_float("lambda_start", *LAMBDAS)
        step = trial.suggest_float("lambda_step", *STEPS, log=True)
        window = trial.suggest_int("window", *self.windows, log=True)
        skip_ratio = trial.suggest_float("skip_ratio", *SKIP_RATIOS)
        rule = suggest_rule(trial, settings.rules, settings.max_tokens)
        excerpts = [Excerpt.of(prompt, text, window, settings.form) for prompt, text in self.texts]
        scores = joint_scores(name, self._target, excerpts, settings.form)
        schedule = schedule_for(self._target, skip_ratio, step, settings.window_growth_cap)
        selection = schedule.settle(scores, lam, settings.form)
        detail = f"{name}, lambda {lam:.2g} to {selection.lam:.2g}, chain only"
        self.notes = {
            "confidence": name,
            "lambda_start": round(lam, 4),
            "lambda_step": round(step, 4),
            "window": window,
            "skip_ratio": round(skip_ratio, 4),
            "lambda": selection.lam,
            ORIGIN: f"conf_layers_tuned ({detail})",
            "num_skipped": len(selection.skipped),
            "skipped": compact_indices(selection.skipped),
        }
        if not selection.skipped:
            return Candidate.plain()
        return Candidate(draft=LayerSkip.blocks(selection.skipped), draft_length=rule)


class ConfLayersTuned(TpeOfRules):
    """TPE over the settings of ConfLayers, from the published ones."""

    name = "conf_layers_tuned"
    Settings = ConfLayersTunedSettings
    space: TunedSpace

    def __init__(self, problem: Problem, settings: ConfLayersTunedSettings) -> None:
        super().__init__(problem, settings)
        self.space = TunedSpace(problem, settings)

    def begin(self, study: optuna.Study) -> None:
        """Enqueue the published settings, with each confidence, and those of the authors' script."""
        starts = [_published_start(name, self.settings) for name in self.settings.confidences]
        # The authors' eval.sh, with which their logs were made.
        starts.append({**starts[0], "skip_ratio": 0.4, "window": 100})
        enqueue_in_new(study, [{**each, "window": min(each["window"], self.space.windows[1])} for each in starts])

    def notes(self, candidate: Candidate) -> dict[str, Any]:
        """Return what led to the set."""
        return self.space.notes

    def finished(self, study: optuna.Study) -> str | None:
        """Return a reason if there is nothing to read confidences from."""
        return super().finished(study) if self.space.texts else "no tuning prompt has a continuation"

    def remarks(self) -> list[str]:
        """Return the parameters of the best trial, and that drafts are chains."""
        return [*([_described(self.best)] if self.best is not None else []), CHAIN_ONLY]


def _published_start(confidence: ConfidenceName, settings: ConfLayersTunedSettings) -> dict[str, Any]:
    """Return the published settings as Optuna parameters, with the published rule if it is among those to choose from."""
    parameters = {
        "confidence": confidence,
        "lambda_start": PUBLISHED.lambda_start,
        "lambda_step": PUBLISHED.lambda_step,
        "window": PUBLISHED.window,
        "skip_ratio": PUBLISHED.skip_ratio,
    }
    rule = PUBLISHED.draft_length
    return parameters | (rule_parameters(rule, settings.max_tokens) if rule.rule in settings.rules else {})


def _described(record: TrialRecord) -> str:
    """Return the parameters of a trial in one line."""
    names = ("confidence", "lambda_start", "lambda_step", "window", "skip_ratio", "lambda", "num_skipped")
    parameters = ", ".join(f"{name} {record.notes[name]}" for name in names)
    return f"best trial {record.number}: {parameters}, draft length {record.candidate.draft_length.describe()}"
