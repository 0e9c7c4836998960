"""ConfLayers (arXiv 2604.14612): an iterative search for blocks to skip, driven by each block's confidence.

One trial is one iteration: it measures a skip set, the odd blocks first. The next set is then selected from the confidences that
the whole model has on the target's own greedy continuation of one tuning prompt, another one each time. Formulas marked [code]
follow the authors' released code, WA225/ConfLayers, down to its float16.

Differences from that code, each for a reason:

* The best set has the highest *measured* speed-up. Theirs has the most accepted tokens, whatever they cost.
* The best set is never empty. Theirs is if no set was kept before the iteration limit, and then the whole model drafts.
* Windows come from continuations that were decoded before the search. Theirs come from the sequence being decoded, so the search
  belongs to one request and never resumes.
* A set that is too small is selected again from the same confidences; theirs are read anew, one round later.
* Drafts are chains. Theirs have 2 to 9 candidates at each depth, which no measurement of ours showed to pay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import BaseTrial, FrozenTrial
from pydantic import Field

from decoding.draft_length import AnyRule, TopProbability
from decoding.drafts import LayerSkip, compact_indices
from decoding.target import Target
from studies.confidence.confidences import MAX_WINDOW, ConfidenceName, Excerpt, joint_scores
from studies.confidence.selection import LAMBDA_STEP, Form, LambdaSchedule, Selection, growth_cap
from studies.contract import ORIGIN, Candidate, Problem, StudySettings, TrialRecord, TrialState
from studies.rule_space import declare_rule
from studies.samplers.contract import StudySampler
from studies.space import Parameters, SkipSpace, Space

MANY_ACCEPTED = 4  # [code] the early stop asks for more accepted tokens per round than this
MOST_MOVES = (
    1000  # ours: range of lambda in Optuna, in steps from its start; the code moves by one or a few steps an iteration
)
MAX_TEXTS = 8  # ours: continuations that one iteration reads at most, where no set is large enough

CHAIN_ONLY = "chain only: the authors' code also verifies further candidates at each depth of the draft"
"""Remark beside results of ConfLayers."""


class ConfLayersSettings(StudySettings):
    """Settings of the ConfLayers search. Defaults are those of the authors' code, except the limits."""

    form: Form = Field(
        "published",
        description="published: the authors' float16 rounding, windows read right after the prompt; "
        "unrounded: float64, windows in their true context (ours)",
    )
    confidences: tuple[ConfidenceName, ...] = Field(
        ("sublayer_entropy",),
        min_length=1,
        description="confidence measures to search with, in turn; the code has sublayer_entropy only",
    )
    skip_ratio: float = Field(0.45, gt=0.0, lt=1.0, description="least share of the middle blocks that a set skips")
    lambda_start: float = Field(0.0, description="lambda of the first selection")
    lambda_step: float = Field(
        LAMBDA_STEP, ge=0.0, description="change of lambda after a selection; 0: lambda is fixed"
    )
    window: int = Field(
        32, ge=1, le=MAX_WINDOW, description="last tokens of a continuation that a confidence is read from (W)"
    )
    max_score: float | None = Field(
        0.95,
        gt=0.0,
        le=1.0,
        description="the search ends at a higher acceptance rate, with more than 4 tokens accepted per round",
    )
    patience: int | None = Field(12, ge=1, description="trials without a better speed-up after which the search ends")
    window_growth_cap: int | None = Field(
        None, ge=0, description="cap of A in the adaptive threshold; default: L // 3 for Qwen models, as in the code"
    )
    draft_length: AnyRule = Field(
        default_factory=lambda: TopProbability(threshold=0.8, max_tokens=25),
        description="draft-length rule that every skip set is measured with",
    )

    def check(self, target: Target) -> None:
        """See `check_target`."""
        check_target(target)


@dataclass(frozen=True)
class _Iteration:
    """What an iteration of one confidence decodes with, and the continuation that it was read from; None at the start."""

    selection: Selection
    text: int | None


class ConfLayersSpace(Space):
    """Skip sets of whole blocks, with what leads to one: a confidence, lambda and the settings. The rule is given."""

    def __init__(self, target: Target, settings: ConfLayersSettings) -> None:
        rule, blocks = settings.draft_length, SkipSpace.of(target, whole_blocks=True)
        super().__init__(target, rules=(rule.rule,), max_tokens=rule.max_tokens, skips=blocks)
        self._settings = settings

    def suggest(self, trial: BaseTrial) -> Candidate:
        """Return the suggested skip set with the rule.

        The trial is asked for what led to the set, for each block that it may skip, and for the rule: Optuna so knows which matter.
        """
        settings = self._settings
        trial.suggest_categorical("confidence", settings.confidences)
        reach = MOST_MOVES * settings.lambda_step
        trial.suggest_float("lambda", settings.lambda_start - reach, settings.lambda_start + reach)
        trial.suggest_int("window", settings.window, settings.window)
        trial.suggest_float("skip_ratio", settings.skip_ratio, settings.skip_ratio)
        draft = self.draft(trial)
        declare_rule(trial, settings.draft_length)
        return Candidate(draft=draft, draft_length=settings.draft_length)


class ConfLayers(StudySampler):
    """One trial per iteration, one skip set per trial. State is rebuilt from the notes of the finished trials."""

    name = "conf_layers"
    Settings = ConfLayersSettings
    follows = True
    space: ConfLayersSpace

    def __init__(self, problem: Problem, settings: ConfLayersSettings) -> None:
        super().__init__(problem, settings)
        self.space = ConfLayersSpace(problem.target, settings)
        self._schedule = schedule_for(
            problem.target, settings.skip_ratio, settings.lambda_step, settings.window_growth_cap
        )
        self._texts = continued_texts(problem)
        odd = Selection(tuple(range(1, problem.target.num_layers - 1, 2)), settings.lambda_start)
        self._next: dict[ConfidenceName, _Iteration | None] = {settings.confidences[0]: _Iteration(odd, None)}
        self._num_iterations = 0
        self._good_enough: int | None = None

    def choose(self, study: optuna.Study, trial: FrozenTrial) -> Parameters:
        """Return this iteration as parameters; the settings and the rule have one value each."""
        confidence, iteration = self._this_iteration()
        skipped = LayerSkip.blocks(iteration.selection.skipped)
        chosen = {"confidence": confidence, "lambda": iteration.selection.lam}
        return chosen | self.space.draft_parameters(skipped)

    def notes(self, candidate: Candidate) -> dict[str, Any]:
        """Return what the set of this iteration was selected with."""
        confidence, iteration = self._this_iteration()
        skipped, lam = iteration.selection.skipped, iteration.selection.lam
        detail, notes = "odd blocks", dict[str, Any](confidence=confidence)
        # The odd blocks were not selected: no lambda led to them.
        if iteration.text is not None:
            detail = f"{confidence}, lambda {lam:g}"
            notes |= {"lambda": lam, "text": iteration.text}
        notes |= {"num_skipped": len(skipped), "skipped": compact_indices(skipped)}
        return notes | {ORIGIN: f"{self.name} ({detail}, chain only)"}

    def observe(self, record: TrialRecord) -> None:
        """Select the next skip set of the trial's confidence, or stop early."""
        self._num_iterations += 1
        notes = record.notes
        if "lambda" not in notes:
            self._next[notes["confidence"]] = self._advance(notes["confidence"], self.settings.lambda_start, 0)
            return
        if self._is_good_enough(record):
            self._good_enough = record.number
        lam = self._schedule.after(notes["num_skipped"], notes["lambda"])
        self._next[notes["confidence"]] = self._advance(notes["confidence"], lam, notes["text"] + 1)

    def finished(self, study: optuna.Study) -> str | None:
        """Return the reason of the authors' early stop, or that no block is selected any more."""
        super().finished(study)
        if self._good_enough is not None:
            return (
                f"trial {self._good_enough} accepts more than {MANY_ACCEPTED} tokens per round, "
                f"at a rate above {self.settings.max_score:g}"
            )
        return None if self._find_next() else "no confidence selects a block on the tuning texts"

    def remarks(self) -> list[str]:
        """Return the remark that drafts are chains."""
        return [CHAIN_ONLY]

    def _this_iteration(self) -> tuple[ConfidenceName, _Iteration]:
        found = self._find_next()
        assert found is not None, "`finished` says so"
        return found

    def _find_next(self) -> tuple[ConfidenceName, _Iteration] | None:
        """Return the next iteration: of the confidence whose turn it is, or of the next one that selects any block."""
        names = self.settings.confidences
        for turn in range(len(names)):
            name = names[(self._num_iterations + turn) % len(names)]
            if name not in self._next:
                self._next[name] = self._advance(name, self.settings.lambda_start, 0)
            if (iteration := self._next[name]) is not None:
                return name, iteration
        return None

    def _advance(self, confidence: ConfidenceName, lam: float, text: int) -> _Iteration | None:
        """Return the selection from continuation `text`, or from the first one after it that gives a large enough set.

        Where none does, the largest set is taken. An empty set is no draft: None.
        """
        best: _Iteration | None = None
        for index in range(text, text + min(len(self._texts), MAX_TEXTS)):
            found = _Iteration(self._select(confidence, lam, index % len(self._texts)), index % len(self._texts))
            if best is None or len(found.selection.skipped) > len(best.selection.skipped):
                best = found
            if len(found.selection.skipped) >= self._schedule.least_skipped:
                break
        return best if best is not None and best.selection.skipped else None

    def _select(self, confidence: ConfidenceName, lam: float, text: int) -> Selection:
        settings = self.settings
        excerpt = Excerpt.of(*self._texts[text], settings.window, settings.form)
        scores = joint_scores(confidence, self.problem.target, [excerpt], settings.form)
        return self._schedule.select(scores, lam, settings.form)

    def _is_good_enough(self, record: TrialRecord) -> bool:
        """Return True if a large enough set drafts as well as the authors' early stop asks for [code].

        Rates are over all rounds of the trial; the authors average the acceptance rates of single rounds.
        """
        measured, max_score = record.measurement, self.settings.max_score
        if max_score is None or measured is None or record.state is not TrialState.COMPLETE:
            return False
        accepted = measured.mean_acceptance_length - 1
        large = record.notes["num_skipped"] >= self._schedule.least_skipped
        return large and accepted > MANY_ACCEPTED and measured.draft_acceptance_rate > max_score


def check_target(target: Target) -> None:
    """Raise ValueError for a model without a block between the first and the last, the only ones that are skipped."""
    if target.num_layers < 3:
        raise ValueError(
            f"ConfLayers skips blocks between the first and the last, and this model has {target.num_layers}"
        )


def schedule_for(target: Target, skip_ratio: float, step: float, window_growth_cap: int | None) -> LambdaSchedule:
    """Return the schedule for a model, whose type decides the cap of the windows' growth unless one is given."""
    num_layers = target.num_layers
    cap = growth_cap(target.config.model_type, num_layers) if window_growth_cap is None else window_growth_cap
    return LambdaSchedule(num_layers, skip_ratio, step, cap)


def continued_texts(problem: Problem) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return each tuning prompt that has a continuation, with that continuation."""
    texts = zip(problem.prompts, problem.continuations, strict=True)
    return [(prompt, continuation) for prompt, continuation in texts if continuation]
