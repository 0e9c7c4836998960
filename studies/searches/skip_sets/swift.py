"""SWIFT's search (arXiv 2410.06916): random skip sets and a few Bayesian ones, rated by matchness.

As in the released code: exactly K_s = int(2(L-2) * ratio) attention and MLP sublayers of the middle blocks are skipped.
Candidates are random; every 25th takes the K_s largest coordinates of the point with the highest upper bound (kappa 2.5). A
candidate is not decoded with. Its matchness is the share of W tokens, after the first token of a continuation, that it predicts
in one parallel pass, with the target's keys and values of the prompt and its own within the continuation. A candidate with a
better matchness than all before becomes the set to decode with. The search ends above a matchness of 0.95, after 300
candidates without a better one, or after 1000.

The trial is our formulation. SWIFT decodes with its best set while it searches; here a trial scores candidates until one is
better than all before, or until 25 are scored, and then measures the best set not measured yet. All of SWIFT's own choices are
therefore measured, and otherwise a runner-up, which SWIFT would not try: matchness ignores time. Scoring is part of the
trial's seconds. The first trial measures the odd blocks, with which SWIFT starts to decode. If measuring takes much longer
than scoring, `until_better: false` and a greater `round_length` leave more of a budget to scoring.

One difference: every candidate is scored on the same few sequences, from the first tuning prompts, as their mean. SWIFT
scores each on the sequence being written, so its best candidate may owe its score to an easier sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import optuna

from decoding.drafts import Draft, LayerSkip
from decoding.target import Target
from studies.contract import Problem, TrialRecord
from studies.prediction.survey import Survey
from studies.searches.skip_sets.bayes import suggest_point
from studies.searches.skip_sets.contract import Method
from studies.searches.skip_sets.random_sets import check_ratio
from studies.searches.skip_sets.settings import SkipSetsSettings
from studies.switches import SkipPoint, Switches, odd_blocks

KAPPA = 2.5


@dataclass(frozen=True)
class _Scored:
    """A candidate and its score."""

    point: SkipPoint
    draft: LayerSkip
    matchness: float


class Swift(Method):
    """State: the candidates scored so far, in order, and the drafts that were measured."""

    def __init__(self, problem: Problem, settings: SkipSetsSettings) -> None:
        super().__init__(problem, settings)
        self._switches = Switches.of_middle_blocks(problem.target.num_layers)
        self._scored: list[_Scored] = []
        self._measured: set[Draft] = set()

    @classmethod
    def check(cls, settings: SkipSetsSettings, target: Target) -> None:
        """Raise ValueError if K_s is 0."""
        check_ratio(settings.skip_ratio, target.num_layers)

    def propose(self, trial: optuna.Trial, num_trials: int) -> tuple[LayerSkip, dict[str, Any]]:
        """Return the odd blocks, then the best unmeasured set after scoring another round of candidates."""
        if num_trials == 0:
            return odd_blocks(self.problem.target.num_layers), {"scores": [], "bayes_points": []}
        scored = self._score_a_round()
        best = self._best_unmeasured(scored)
        fresh = range(len(self._scored), len(scored))
        return best.draft, {
            "matchness": best.matchness,
            "num_scored": len(scored),
            "scores": [scored[index].matchness for index in fresh],
            "bayes_points": [scored[index].point.tolist() for index in fresh if self._is_bayesian(index)],
        }

    def observe(self, record: TrialRecord) -> None:
        """Take over the scores of the trial's round; random candidates are drawn again, Bayesian ones are in the notes."""
        noted = iter(record.notes["bayes_points"])
        for score in record.notes["scores"]:
            index = len(self._scored)
            point = np.array(next(noted)) if self._is_bayesian(index) else self._random(index)
            self._scored.append(_Scored(point, self._draft(point), score))
        self._measured.add(record.candidate.draft)

    def finished(self) -> str | None:
        """Return the reason if one of SWIFT's own stops applies."""
        return self._why_ended(self._scored)

    def matchness(self, draft: LayerSkip) -> float:
        """Return the share of tokens that the draft predicts; all sequences have the same weight."""
        agreements = [recording.agreement for recording in self._survey.record(draft)]
        return sum(agreements) / len(agreements)

    @cached_property
    def _survey(self) -> Survey:
        """Survey of one round of W tokens per sequence, made on first use, so that its seconds count with a trial."""
        settings = self.settings.swift
        continuations = self.problem.continuations[: settings.num_texts]
        return Survey(
            self.problem.target,
            self.problem.prompts[: settings.num_texts],
            [continuation[: settings.window + 1] for continuation in continuations],
            depth=settings.window,
        )

    def _score_a_round(self) -> list[_Scored]:
        """Return all candidates: the known ones, then the round of this trial."""
        scored = list(self._scored)
        best = max((each.matchness for each in scored), default=0.0)
        for _ in range(self.settings.swift.round_length):
            point = self._next_point(scored)
            draft = self._draft(point)
            scored.append(_Scored(point, draft, self.matchness(draft)))
            is_better = scored[-1].matchness > best
            if (is_better and self.settings.swift.until_better) or self._why_ended(scored):
                break
        return scored

    def _best_unmeasured(self, scored: Sequence[_Scored]) -> _Scored:
        """Return the best unmeasured candidate, or the best of all if all are measured, as in a small model."""
        unmeasured = [each for each in scored if each.draft not in self._measured]
        return max(unmeasured or scored, key=lambda each: each.matchness)

    def _next_point(self, scored: Sequence[_Scored]) -> SkipPoint:
        index = len(scored)
        if not self._is_bayesian(index):
            return self._random(index)
        return suggest_point(
            [each.point for each in scored],
            [each.matchness for each in scored],
            size=len(self._switches),
            kappa=KAPPA,
            rng=self._stream(index),
        )

    def _is_bayesian(self, index: int) -> bool:
        return (index + 1) % self.settings.swift.bayes_interval == 0

    def _random(self, index: int) -> SkipPoint:
        return self._switches.random(self._stream(index), self._num_skipped)

    def _stream(self, index: int) -> np.random.Generator:
        return np.random.default_rng([self.problem.seed, index])

    def _draft(self, point: SkipPoint) -> LayerSkip:
        return self._switches.largest(point, self._num_skipped)

    @property
    def _num_skipped(self) -> int:
        return self._switches.num_skipped(self.settings.skip_ratio)

    def _why_ended(self, scored: Sequence[_Scored]) -> str | None:
        if not scored:
            return None
        settings = self.settings.swift
        scores = [each.matchness for each in scored]
        best = max(scores)
        if best > settings.max_matchness:
            return f"a matchness of {best:.3f} is reached"
        if len(scores) - scores.index(best) > settings.tolerance:
            return f"no better matchness in {settings.tolerance} candidates"
        return f"{len(scores)} candidates scored" if len(scores) >= settings.max_candidates else None
