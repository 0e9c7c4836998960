"""A search that predicts much and measures little: drafts of a pool and draft-length rules, chosen by corrected predictions.

Our formulation. Before each trial every rule worth a look is replayed on every draft of the pool; what earlier trials have
shown is taken out of the predictions (`studies.prediction.residual`); and the candidate with the highest upper bound
is measured. The best
of those measured is the one of which most is expected, on all texts that are foretold: the few prompts of a trial flatter
whatever does best on them. Nothing here measures: studies that search this way (`predicted`, `joint`) differ in their pool alone,
which may grow as they go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution

from decoding.draft_length import RULES, DraftLengthRule
from decoding.drafts import Draft
from studies.contract import Candidate, TrialRecord, TrialState
from studies.measurement import Measurement
from studies.prediction.contract import Prediction
from studies.prediction.predictor import Predictor, usual_rules
from studies.prediction.residual import Residual
from studies.rule_space import draw_rule, near_rule, rule_parameters, suggest_rule

USUAL = 4
"""Of the usual rules, how many are considered on each draft: those that are foretold to do best."""
DRAWN, DRAWN_ON = 3, 6
"""Settings of each rule drawn anew, and the drafts they are drawn for: those of which most is expected."""
MOST_DRAFTS = 10_000
"""Room for the number of a draft among the parameters of a trial: far more than a pool will hold."""
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
LEAST_GAIN = 0.01
"""Relative gain in what is expected of the best that keeps a search going: less is what a trial's noise comes to."""


@dataclass(frozen=True)
class Choice:
    """A candidate not yet measured, and what is expected of it."""

    place: int
    """Of the draft in the pool."""
    prediction: Prediction
    corrected: float
    """The predicted speed-up, the error expected taken out."""
    within_reach: float
    """The highest speed-up that anything not yet measured could be hoped to have."""


class GuidedSearch:
    """What was measured, and what to measure next. The same trials lead to the same choices, so that a search resumes as it was."""

    def __init__(
        self, pool: Iterable[Draft], predictor: Predictor, rules: Sequence[str], *, seed: int, patience: int
    ) -> None:
        self.pool: list[Draft] = []
        self.predictor, self._rules = predictor, tuple(rules)
        self._seed, self._patience = seed, patience
        self._residual = Residual()
        self._known: set[str] = set()
        self._behaviours: set[tuple[Draft, object]] = set()
        self._complete: dict[str, Prediction] = {}
        self._incumbent: str | None = None
        self._num_trials = self._last_improvement = 0
        self._next: tuple[int, int, Choice | None] | None = None
        self.add(pool)

    def add(self, drafts: Iterable[Draft]) -> list[Draft]:
        """Put drafts into the pool, behind those that are there; returns those that were not. Patience begins anew for them."""
        added = [draft for draft in dict.fromkeys(drafts) if draft not in self.pool]
        self.pool += added
        if added:
            self._last_improvement = self._num_trials
        return added

    def sampler(self) -> optuna.samplers.BaseSampler:
        """Gives the next trial the parameters of what `choose` chose."""
        return _Chosen(self._parameters)

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """The candidate with the parameters of a trial, and what is foretold of it."""
        draft = self.pool[trial.suggest_int("draft", 0, MOST_DRAFTS)]
        rule = suggest_rule(trial, self._rules, self.predictor.max_tokens)
        prediction = self.predictor.predict(draft, rule)
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
        prediction = self.predictor.predict(draft, record.candidate.draft_length)
        self._known.add(record.candidate.key)
        self._behaviours.add((draft, prediction.replayed))
        if record.repeat_of is not None or record.state is TrialState.FAIL or measurement is None:
            return
        parts = self.predictor.parts
        foretold = [sample for sample in measurement.samples if sample.prompt in parts]
        if sum(sample.texts.count for sample in foretold) >= FEWEST_SAMPLES:
            on_these = prediction.replayed.speedup_on([part for sample in foretold for part in parts[sample.prompt]])
            self._residual.learn(prediction, Measurement(samples=tuple(foretold)).speedup, on_these)
        if record.state is TrialState.COMPLETE:
            self._complete[record.candidate.key] = prediction
            self._keep_best()

    def _keep_best(self) -> None:
        expected = self.expected()
        best = max(expected, key=lambda key: expected[key])
        if expected[best] > expected.get(self._incumbent or "", 0.0) * (1 + LEAST_GAIN):
            self._last_improvement = self._num_trials
        self._incumbent = best

    def expected(self) -> dict[str, float]:
        """Of each candidate measured in full, by its key, the speed-up to expect on all texts that are foretold."""
        if not self._complete:
            return {}
        corrected, _ = self._residual.corrected(list(self._complete.values()))
        return {key: float(value) for key, value in zip(self._complete, corrected, strict=True)}

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
        return max(self.expected().values(), default=0.0)

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
        now = self._num_trials, len(self.pool)
        if self._next is None or self._next[:2] != now:
            self._next = (*now, self._choose())
        return self._next[2]

    def _choose(self) -> Choice | None:
        fresh = [each for each in self._considered() if not self._is_known(each)]
        if not fresh:
            return None
        corrected, spread = self._residual.corrected(fresh)
        place = int(np.argmax(corrected * np.exp(OPTIMISM * spread)))
        within_reach = float(np.max(corrected * np.exp(REACH * spread)))
        return Choice(self.pool.index(fresh[place].draft), fresh[place], float(corrected[place]), within_reach)

    def _considered(self) -> list[Prediction]:
        """On each draft the usual rules that do best and all rules' defaults; on the best some drawn anew; rules near the best
        measured."""
        stream = np.random.default_rng([self._seed, self._num_trials])
        most = self.predictor.max_tokens
        usual_rules_asked = [each for each in usual_rules(most) if each.rule in self._rules]
        defaults = [self._within(RULES[name](rule=name)) for name in self._rules]
        on_each = []
        self.predictor.record(self.pool)
        for draft in self.pool:
            usual = self.predictor.predict_all(draft, usual_rules_asked)[:USUAL]
            on_each.append(
                sorted([*usual, *self.predictor.predict_all(draft, defaults)], key=lambda each: -each.speedup)
            )
        considered = [prediction for of_draft in on_each for prediction in of_draft]
        if on_each:
            corrected, _ = self._residual.corrected([of_draft[0] for of_draft in on_each])
            for place in np.argsort(-corrected, kind="stable")[:DRAWN_ON]:
                drawn = [draw_rule(name, most, stream) for name in self._rules for _ in range(DRAWN)]
                considered += self.predictor.predict_all(self.pool[place], drawn)
        if self._incumbent is not None:
            best = self._complete[self._incumbent]
            near = [near_rule(best.rule, most, NEARNESS, stream) for _ in range(NEAR)]
            considered += self.predictor.predict_all(best.draft, near)
        return considered

    def _within(self, rule: DraftLengthRule) -> DraftLengthRule:
        """The rule with a length that is searched."""
        return rule.model_copy(update={"max_tokens": min(rule.max_tokens, self.predictor.max_tokens)})

    def _is_known(self, prediction: Prediction) -> bool:
        """Whether it was measured, or another rule that drafts the same on the surveyed texts."""
        key = Candidate(draft=prediction.draft, draft_length=prediction.rule).key
        return key in self._known or (prediction.draft, prediction.replayed) in self._behaviours

    def _parameters(self) -> dict[str, Any]:
        choice = self.choose()
        assert choice is not None, "a study with nothing left to measure is finished"
        return {"draft": choice.place, **rule_parameters(choice.prediction.rule, self.predictor.max_tokens)}


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
