"""A search that predicts much and measures little: drafts of a pool and draft-length rules, chosen by corrected predictions.

Our formulation. Before each trial every rule worth a look is replayed on every draft of the pool; what earlier trials have
shown is taken out of the predictions (`studies.residual`); and the candidate with the highest upper bound is measured. Nothing
here measures: studies that search this way (`predicted`, `joint`) differ in their pool alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution

from decoding.draft_length import RULES, DraftLengthRule
from decoding.profile import PlainDecoding
from studies.contract import Candidate, TrialRecord, TrialState
from studies.prediction import Drafting, Prediction, Predictor, usual_rules
from studies.residual import Residual
from studies.rule_space import draw_rule, near_rule, rule_parameters, suggest_rule

USUAL = 4
"""Of the usual rules, how many are considered on each draft: those that are foretold to do best."""
DRAWN = 3
"""Settings of each rule drawn anew for each draft."""
NEAR, NEARNESS = 8, 0.1
"""Settings near the best one measured, and how near: a standard deviation, as a share of the range that is searched."""
OPTIMISM = 1.0
"""Standard deviations added to a prediction when the next candidate is chosen."""
REACH = 2.0
"""Standard deviations that a prediction may lie below the best measured speed-up and still be worth measuring."""
FEWEST_TRIALS = 5
"""Trials before it is asked whether anything is left within reach."""
FEWEST_SAMPLES = 3
"""Prompts that a trial which was given up early must have decoded to be learnt from."""


@dataclass(frozen=True)
class Choice:
    """A candidate not yet measured, and what is expected of it."""

    label: str
    prediction: Prediction
    corrected: float
    """The predicted speed-up, the error expected taken out."""
    within_reach: float
    """The highest speed-up that anything not yet measured could be hoped to have."""


class GuidedSearch:
    """What was measured, and what to measure next. The same trials lead to the same choices, so that a search resumes as it was."""

    def __init__(
        self, pool: Mapping[str, Drafting], predictor: Predictor, rules: Sequence[str], *, seed: int, patience: int
    ) -> None:
        self._pool, self._predictor, self._rules = dict(pool), predictor, tuple(rules)
        self._labels = {draft: label for label, draft in self._pool.items()}
        self._seed, self._patience = seed, patience
        self._residual = Residual()
        self._known: set[str] = set()
        self._behaviours: set[tuple[Drafting, object]] = set()
        self._complete: list[Prediction] = []
        self._best: TrialRecord | None = None
        self._num_trials = self._last_improvement = 0
        self._next: tuple[int, Choice | None] | None = None

    def sampler(self) -> optuna.samplers.BaseSampler:
        """Gives the next trial the parameters of what `choose` chose."""
        return _Chosen(self._parameters)

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """The candidate with the parameters of a trial, and what is foretold of it."""
        draft = self._pool[trial.suggest_categorical("draft", list(self._pool))]
        rule = suggest_rule(trial, self._rules, self._predictor.max_tokens)
        prediction = self._predictor.predict(draft, rule)
        (corrected,), _ = self._residual.corrected([prediction])
        notes = {
            "predicted_speedup": round(prediction.speedup, 4),
            "corrected_speedup": round(float(corrected), 4),
            "predicted_agreement": round(prediction.agreement, 4),
        }
        return Candidate(draft=draft, draft_length=rule), notes

    def observe(self, record: TrialRecord) -> None:
        """Learn from a trial how far its prediction was off."""
        self._num_trials += 1
        draft, measurement = record.candidate.draft, record.measurement
        assert not isinstance(draft, PlainDecoding), "a pool holds drafts"
        prediction = self._predictor.predict(draft, record.candidate.draft_length)
        self._known.add(record.candidate.key)
        self._behaviours.add((draft, prediction.replayed))
        if record.repeat_of is not None or record.state is TrialState.FAIL or measurement is None:
            return
        if len(measurement.samples) >= FEWEST_SAMPLES:
            self._residual.learn(prediction, measurement.speedup)
        if record.speedup is None:
            return
        self._complete.append(prediction)
        if record.speedup > self._best_speedup:
            self._best, self._last_improvement = record, self._num_trials

    def finished(self) -> str | None:
        """`patience` trials without a better speed-up, nothing left to measure, or nothing left within reach of the best."""
        if (idle := self._num_trials - self._last_improvement) >= self._patience:
            return f"no better candidate in {idle} trials"
        choice = self.choose()
        if choice is None:
            return "all candidates are measured"
        if self._num_trials >= FEWEST_TRIALS and choice.within_reach < (best := self._expected_of_best()):
            return f"nothing is left that could be hoped to beat {best:.2f}x"
        return None

    def _expected_of_best(self) -> float:
        """The speed-up to expect of the best candidate measured: less than was measured, as the best of many was lucky too."""
        return float(np.max(self._residual.corrected(self._complete)[0])) if self._complete else 0.0

    def remarks(self) -> list[str]:
        """How good the predictions were, and what more trials might gain."""
        said = []
        if len(self._residual.pairs) >= FEWEST_TRIALS:
            errors = [abs(measured / predicted - 1) for predicted, measured in self._residual.pairs]
            said.append(f"predictions were off by {np.median(errors):.0%} at the median of {len(errors)} trials")
        choice = self.choose()
        if choice is not None and choice.corrected > self._expected_of_best() > 0:
            rule = choice.prediction.rule.describe()
            said.append(
                f"the best that was not measured is expected at {choice.corrected:.2f}x on the tuning prompts: "
                f"{choice.prediction.draft.describe()}; {rule}"
            )
        return said

    def choose(self) -> Choice | None:
        """The candidate to measure next, or None if all that are considered have been."""
        if self._next is None or self._next[0] != self._num_trials:
            self._next = (self._num_trials, self._choose())
        return self._next[1]

    def _choose(self) -> Choice | None:
        fresh = [each for each in self._considered() if not self._is_known(each)]
        if not fresh:
            return None
        corrected, spread = self._residual.corrected(fresh)
        place = int(np.argmax(corrected * np.exp(OPTIMISM * spread)))
        within_reach = float(np.max(corrected * np.exp(REACH * spread)))
        return Choice(self._labels[fresh[place].draft], fresh[place], float(corrected[place]), within_reach)

    def _considered(self) -> list[Prediction]:
        """On each draft the usual rules that do best, all rules' defaults and some drawn anew; and rules near the best measured."""
        stream = np.random.default_rng([self._seed, self._num_trials])
        most = self._predictor.max_tokens
        considered = []
        for draft in self._pool.values():
            usual = self._predictor.predict_all(draft, [r for r in usual_rules(most) if r.rule in self._rules])
            drawn = [draw_rule(name, most, stream) for name in self._rules for _ in range(DRAWN)]
            defaults = [self._within(RULES[name](rule=name)) for name in self._rules]
            considered += [*usual[:USUAL], *self._predictor.predict_all(draft, [*defaults, *drawn])]
        if self._best is not None and not isinstance(best := self._best.candidate.draft, PlainDecoding):
            rule = self._best.candidate.draft_length
            near = [near_rule(rule, most, NEARNESS, stream) for _ in range(NEAR)]
            considered += self._predictor.predict_all(best, near)
        return considered

    def _within(self, rule: DraftLengthRule) -> DraftLengthRule:
        """The rule with a length that is searched."""
        return rule.model_copy(update={"max_tokens": min(rule.max_tokens, self._predictor.max_tokens)})

    def _is_known(self, prediction: Prediction) -> bool:
        """Whether it was measured, or another rule that drafts the same on the surveyed texts."""
        key = Candidate(draft=prediction.draft, draft_length=prediction.rule).key
        return key in self._known or (prediction.draft, prediction.replayed) in self._behaviours

    @property
    def _best_speedup(self) -> float:
        return (self._best.speedup or 0.0) if self._best is not None else 0.0

    def _parameters(self) -> dict[str, Any]:
        choice = self.choose()
        assert choice is not None, "a study with nothing left to measure is finished"
        return {"draft": choice.label, **rule_parameters(choice.prediction.rule, self._predictor.max_tokens)}


class _Chosen(optuna.samplers.BaseSampler):
    """Every parameter of a trial as it was chosen; asked for one by one, as `suggest_*` is called."""

    def __init__(self, parameters: Callable[[], dict[str, Any]]) -> None:
        self._parameters = parameters

    def infer_relative_search_space(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        return self._parameters()[param_name]
