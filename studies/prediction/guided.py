"""A guided search: many predictions, few trials, over the drafts of a pool and the draft-length rules.

Our formulation. Before each trial, every promising rule is replayed on every draft of the pool. The error seen in earlier trials
is removed from the predictions by a Gaussian process on the logarithm of measured over predicted speed-up, and the candidate with
the highest upper bound is measured. Among measured candidates, the best is the one with the highest corrected prediction on all
surveyed sequences: the few prompts of a trial flatter the candidate that does best on them. Nothing here measures. The pool may
grow during the search.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from decoding.draft_length import RULES, DraftLengthRule
from decoding.drafts import Draft
from studies.contract import Candidate, TrialRecord, TrialState
from studies.measurement import Measurement
from studies.prediction.predictor import Predictor, usual_rules
from studies.prediction.predictors import Prediction
from studies.rule_space import draw_rule, near_rule

USUAL = 4
"""Number of the usual rules considered on each draft, by predicted speed-up."""
DRAWN, DRAWN_ON = 3, 6
"""Number of random settings of each rule, and number of drafts they are drawn for, by corrected prediction."""
NEAR, NEARNESS = 8, 0.1
"""Number of settings near the best measured one, and their standard deviation as a share of the searched range."""
OPTIMISM = 1.0
"""Standard deviations added to a prediction when the next candidate is chosen."""
REACH = 2.0
"""Standard deviations that a prediction may lie below the best speed-up and still be worth measuring."""
FEWEST_TRIALS = 5
"""Trials before the search may end because nothing is left within reach."""
FEWEST_SAMPLES = 3
"""Fewest prompts of a pruned trial that corrects the predictions."""
LEAST_GAIN = 0.01
"""Relative gain in the expected best speed-up that counts as an improvement: less is trial noise."""
# Standard deviations of the logarithm: the bias shared by all predictions, the bias shared by similar drafts, and trial noise.
SHARED, OF_ALIKE, NOISE = 0.15, 0.08, 0.03
SCALES = (0.2, 0.3, 0.3)


class Residual:
    """The correction of predictions, from the trials seen so far.

    Its inputs describe how a draft spends its time, because a cost table errs alike for similar drafts: the predicted speed-up, the
    tokens per round, and the draft passes per round.
    """

    def __init__(self) -> None:
        kernel = ConstantKernel(SHARED**2, "fixed")
        kernel += ConstantKernel(OF_ALIKE**2, "fixed") * RBF(SCALES, "fixed") + WhiteKernel(NOISE**2, "fixed")
        self._process = GaussianProcessRegressor(kernel, optimizer=None)
        self._inputs: list[tuple[float, ...]] = []
        self.pairs: list[tuple[float, float]] = []
        """Predicted and measured speed-up of each trial, in order."""

    def learn(self, prediction: Prediction, measured: float, predicted: float | None = None) -> None:
        """Add a trial with its measured speed-up.

        `predicted` is the predicted speed-up on the prompts of the trial, if the prediction covers more.
        """
        self._inputs.append(_features(prediction))
        self.pairs.append((prediction.speedup if predicted is None else predicted, measured))
        errors = [math.log(measured / predicted) for predicted, measured in self.pairs]
        self._process.fit(np.array(self._inputs), np.array(errors))

    def believing(self, pending: Sequence[Prediction]) -> Residual:
        """Return a correction that takes the corrected predictions of running trials for their results.

        Near them the spread is then as small as if they had ended, so that another candidate is chosen ("kriging believer",
        Ginsbourger, Le Riche and Carraro, 2010).
        """
        if not pending:
            return self
        believed, _ = self.corrected(pending)
        other = Residual()
        other._inputs = [*self._inputs, *map(_features, pending[:-1])]
        other.pairs = [
            *self.pairs,
            *zip((each.speedup for each in pending[:-1]), believed[:-1].tolist(), strict=True),
        ]
        other.learn(pending[-1], float(believed[-1]))
        return other

    def corrected(self, predictions: Sequence[Prediction]) -> tuple[np.ndarray, np.ndarray]:
        """Return the corrected speed-ups [predictions] and the standard deviation [predictions] of their logarithm.

        The standard deviation excludes trial noise.
        """
        mean, spread = self._process.predict(np.array([_features(each) for each in predictions]), return_std=True)
        raw = np.array([prediction.speedup for prediction in predictions])
        # scikit-learn's spread includes the noise, because the noise is part of the kernel.
        return raw * np.exp(mean), np.sqrt(np.maximum(spread**2 - NOISE**2, 0.0))


def _features(prediction: Prediction) -> tuple[float, ...]:
    replayed = prediction.replayed
    per_round = replayed.tokens / replayed.rounds, replayed.draft_passes / replayed.rounds
    return (math.log(prediction.speedup), math.log(per_round[0]), math.log1p(per_round[1]))


@dataclass(frozen=True)
class Choice:
    """A candidate that is not yet measured, and its expected speed-up."""

    prediction: Prediction
    corrected: float
    """Predicted speed-up without the expected error."""
    within_reach: float
    """Highest upper bound of the speed-up among all candidates that are not yet measured."""


class GuidedSearch:
    """The trials so far and the next candidate. The same trials lead to the same choices, so that a search can resume."""

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
        self._pending: dict[str, Prediction] = {}
        """By key: candidates that are measured now, on other devices."""
        self._next: tuple[tuple[int, int, frozenset[str]], Choice | None] | None = None
        self.add(pool)

    def add(self, drafts: Iterable[Draft]) -> list[Draft]:
        """Append drafts that may be measured to the pool and return the new ones; patience starts again for them."""
        fresh = (draft for draft in dict.fromkeys(drafts) if draft not in self.pool)
        added = [draft for draft in fresh if self.predictor.accepts(draft)]
        self.pool += added
        if added:
            self._last_improvement = self._num_trials
        return added

    def propose_beside(self, pending: Iterable[Candidate]) -> None:
        """From now on choose candidates to be measured beside these."""
        self._pending = {each.key: self.predictor.predict(each.draft, each.draft_length) for each in pending}

    def chosen(self) -> Candidate:
        """Return the candidate to measure next."""
        choice = self.choose()
        assert choice is not None, "a study with nothing left to measure is finished"
        return Candidate(draft=choice.prediction.draft, draft_length=choice.prediction.rule)

    def notes(self, candidate: Candidate) -> dict[str, Any]:
        """Return notes on the prediction of a candidate."""
        prediction = self.predictor.predict(candidate.draft, candidate.draft_length)
        (corrected,), _ = self._residual.corrected([prediction])
        return {
            "predicted_speedup": round(prediction.speedup, 4),
            "corrected_speedup": round(float(corrected), 4),
            "predicted_agreement": round(prediction.agreement, 4),
        }

    def observe(self, record: TrialRecord) -> None:
        """Learn the error of a prediction from its trial."""
        self._num_trials += 1
        self._pending.pop(record.candidate.key, None)
        draft, measurement = record.candidate.draft, record.measurement
        prediction = self.predictor.predict(draft, record.candidate.draft_length)
        self._known.add(record.candidate.key)
        self._behaviours.add((draft, prediction.replayed))
        if record.repeat_of is not None or record.state is TrialState.FAIL or measurement is None:
            return
        parts = self.predictor.parts
        predicted = [sample for sample in measurement.samples if sample.prompt in parts]
        # A trial decodes with the target's keys: of a draft that is to have its own, its speed says nothing.
        survey = self.predictor.survey
        is_alike = not survey.own_keys or draft.has_targets_keys(survey.target.num_layers)
        if is_alike and sum(sample.texts.count for sample in predicted) >= FEWEST_SAMPLES:
            on_these = prediction.replayed.speedup_on([part for sample in predicted for part in parts[sample.prompt]])
            self._residual.learn(prediction, Measurement(samples=tuple(predicted)).speedup, on_these)
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
        """Return the expected speed-up on all surveyed sequences of each fully measured candidate, by its key."""
        if not self._complete:
            return {}
        corrected, _ = self._residual.corrected(list(self._complete.values()))
        return {key: float(value) for key, value in zip(self._complete, corrected, strict=True)}

    def finished(self) -> str | None:
        """Return the reason to stop: patience is spent, or nothing is left to measure or within reach; else None."""
        if (idle := self._num_trials - self._last_improvement) >= self._patience:
            return f"no better candidate in {idle} trials"
        choice = self.choose()
        if choice is None:
            return "all candidates are measured"
        if self._num_trials >= FEWEST_TRIALS and choice.within_reach < (best := self._expected_of_best()):
            return f"no candidate left is likely to beat the best one, which is expected to reach {best:.2f}x on all surveyed texts"
        return None

    def _expected_of_best(self) -> float:
        """Return the expected speed-up of the best measured candidate: less than measured, as the best of many was lucky."""
        return max(self.expected().values(), default=0.0)

    def remarks(self) -> list[str]:
        """Return remarks on the accuracy of the predictions and on the gain of further trials."""
        remarks = []
        if len(self._residual.pairs) >= FEWEST_TRIALS:
            errors = [abs(measured / predicted - 1) for predicted, measured in self._residual.pairs]
            remarks.append(f"median error of the predictions: {np.median(errors):.0%}, over {len(errors)} trials")
        choice = self.choose()
        if choice is not None and choice.corrected > self._expected_of_best() > 0:
            draft, rule = choice.prediction.draft.describe(), choice.prediction.rule.describe()
            remarks.append(
                f"best candidate left to measure: {choice.corrected:.2f}x expected on tuning prompts, {draft}; {rule}"
            )
        return remarks

    def choose(self) -> Choice | None:
        """Return the candidate to measure next, or None if every considered one is measured."""
        now = self._num_trials, len(self.pool), frozenset(self._pending)
        if self._next is None or self._next[0] != now:
            self._next = now, self._choose()
        return self._next[1]

    def _choose(self) -> Choice | None:
        residual = self._residual.believing(list(self._pending.values()))
        fresh = [each for each in self._considered(residual) if not self._is_known(each)]
        if not fresh:
            return None
        corrected, spread = residual.corrected(fresh)
        index = int(np.argmax(corrected * np.exp(OPTIMISM * spread)))
        within_reach = float(np.max(corrected * np.exp(REACH * spread)))
        return Choice(fresh[index], float(corrected[index]), within_reach)

    def _considered(self, residual: Residual) -> list[Prediction]:
        """Return the candidates worth a look, measured or not.

        On each draft the best usual rules and every rule's defaults; on the best drafts random settings; near the best measured
        rule random neighbours.
        """
        stream = np.random.default_rng([self._seed, self._num_trials + len(self._pending)])
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
            corrected, _ = residual.corrected([of_draft[0] for of_draft in on_each])
            for index in np.argsort(-corrected, kind="stable")[:DRAWN_ON]:
                drawn = [draw_rule(name, most, stream) for name in self._rules for _ in range(DRAWN)]
                considered += self.predictor.predict_all(self.pool[index], drawn)
        if self._incumbent is not None:
            best = self._complete[self._incumbent]
            near = [near_rule(best.rule, most, NEARNESS, stream) for _ in range(NEAR)]
            considered += self.predictor.predict_all(best.draft, near)
        return considered

    def _within(self, rule: DraftLengthRule) -> DraftLengthRule:
        """Return the rule with a draft length inside the searched range."""
        return rule.model_copy(update={"max_tokens": min(rule.max_tokens, self.predictor.max_tokens)})

    def _is_known(self, prediction: Prediction) -> bool:
        """Return whether the candidate was measured, or another rule with the same rounds on the surveyed sequences.

        What is measured now counts as measured.
        """
        key = Candidate(draft=prediction.draft, draft_length=prediction.rule).key
        behaviour = prediction.draft, prediction.replayed
        if key in self._known or key in self._pending or behaviour in self._behaviours:
            return True
        return any((each.draft, each.replayed) == behaviour for each in self._pending.values())
