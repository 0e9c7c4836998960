"""SWIFT's search (arXiv 2410.06916): random skip sets and a few Bayesian ones, rated by matchness.

As in the released code: exactly K_s = int(2(L-2) * ratio) attention and MLP sublayers of the middle blocks are left out;
candidates are random, every 25th is the K_s largest coordinates of the point of the highest upper bound (kappa 2.5). A
candidate is not decoded with: its matchness is the share of the first W tokens behind the first of a text that it foretells in
one parallel pass, behind the target's keys and values of the prompt and with its own within the text. A better matchness than
any before makes it the set to decode with. The search ends above a matchness of 0.95, after 300 candidates without a better
one, or after 1000.

Our formulation is what a trial is. SWIFT decodes with its best set while it searches; here a trial scores candidates until one
is better than any before, or until 25 are scored, and then measures the best set not measured yet. So SWIFT's own choices are all
measured, and when there is none a runner-up is, which SWIFT would not try: matchness takes no account of time. Scoring is
part of the trial's seconds. The first trial is the odd blocks, with which SWIFT begins to decode. Where measuring takes much
longer than scoring, `until_better: false` and a greater `round_length` leave more of a budget to scoring.

What differs: every candidate is scored on the same few texts, the first of the tuning prompts, as their mean; SWIFT scores each
on the text being written at the time, so that its best so far may owe that to an easier text.
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
from studies.searches.skip_sets.switches import SkipPoint, Switches, odd_blocks

KAPPA = 2.5


@dataclass(frozen=True)
class _Scored:
    """A candidate and what came of it."""

    point: SkipPoint
    draft: LayerSkip
    matchness: float


class Swift(Method):
    """Knows the candidates scored so far, in order, and which were measured."""

    def __init__(self, problem: Problem, settings: SkipSetsSettings) -> None:
        super().__init__(problem, settings)
        self._switches = Switches.of_middle_blocks(problem.target.num_layers)
        self._scored: list[_Scored] = []
        self._measured: set[Draft] = set()

    @classmethod
    def check(cls, settings: SkipSetsSettings, target: Target) -> None:
        """Raise ValueError if K_s is 0."""
        check_ratio(settings.skip_ratio, target.num_layers)

    def propose(self, trial: optuna.Trial, place: int) -> tuple[LayerSkip, dict[str, Any]]:
        """The odd blocks, then the best set not measured yet once another round of candidates is scored."""
        if place == 0:
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
        """Take over the scores of the trial's round; random candidates are drawn again, the others were noted."""
        noted = iter(record.notes["bayes_points"])
        for score in record.notes["scores"]:
            index = len(self._scored)
            point = np.array(next(noted)) if self._is_bayesian(index) else self._random(index)
            self._scored.append(_Scored(point, self._draft(point), score))
        self._measured.add(record.candidate.draft)

    def finished(self) -> str | None:
        """SWIFT's own stops."""
        return self._why_ended(self._scored)

    def matchness(self, draft: LayerSkip) -> float:
        """Share of the tokens that the draft foretells, the texts weighing the same."""
        agreements = [recording.agreement for recording in self._survey.record(draft)]
        return sum(agreements) / len(agreements)

    @cached_property
    def _survey(self) -> Survey:
        """A single round of W tokens on each text. Made when first asked, so that its seconds are a trial's."""
        settings = self.settings.swift
        texts = self.problem.continuations[: settings.num_texts]
        return Survey(
            self.problem.target,
            self.problem.prompts[: settings.num_texts],
            [text[: settings.window + 1] for text in texts],
            depth=settings.window,
        )

    def _score_a_round(self) -> list[_Scored]:
        """All candidates, with those of this trial behind those known."""
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
        """The first of the best; where all are measured, as they may be in a small model, the best of all."""
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
