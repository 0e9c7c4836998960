"""Surveys of a search by prediction: few tuning sequences to rate many drafts on, more to predict the pool on."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from decoding.drafts import Draft
from studies.contract import Problem
from studies.prediction.survey import JoinedSurvey, Survey


class PoolSurveys:
    """The surveys on `survey_tokens` and on `pool_tokens` tokens of the tuning sequences, in whole batches."""

    def __init__(self, problem: Problem, survey_tokens: int, pool_tokens: int) -> None:
        self._problem = problem
        self._first = self._sequences(0, survey_tokens)
        self._more = self._sequences(self._first.stop, pool_tokens)

    def first(self, exits: Iterable[Draft]) -> Survey:
        """Return the survey of the first sequences; the states of `exits` are kept in the same pass."""
        return self._survey(self._first, exits)

    def extended(self, first: Survey, pool: Iterable[Draft]) -> Survey | JoinedSurvey:
        """Return the survey `first` joined with further sequences; the states of exits in the pool are kept in the same pass."""
        if not any(len(continuation) > 1 for continuation in self._problem.continuations[self._more]):
            return first
        return JoinedSurvey(first, self._survey(self._more, pool), self._first.stop)

    def _sequences(self, start: int, num_tokens: int) -> slice:
        """Return the sequences from `start` that reach `num_tokens` with those before: whole batches, at least one."""
        lengths = np.cumsum([len(continuation) for continuation in self._problem.continuations])
        size = self._problem.batch_size
        num_batches = -(-(int(np.searchsorted(lengths, num_tokens)) + 1) // size)
        return slice(start, min(max(start, num_batches * size), len(lengths)))

    def _survey(self, sequences: slice, exits: Iterable[Draft]) -> Survey:
        problem = self._problem
        return Survey(
            problem.target,
            problem.prompts[sequences],
            problem.continuations[sequences],
            decoding=problem.decoding,
            seed=problem.seed + sequences.start,
            heads=problem.heads,
            exits=exits,
        )
