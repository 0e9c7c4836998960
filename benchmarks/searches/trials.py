"""A search of ours or a rival, run on a bench until its budget is spent: each trial is real decoding of the same tuning prompts.

No trial is pruned, of any search. A candidate that was measured before takes over its measurement.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import optuna

from benchmarks.searches.rivals import RIVALS
from studies.contract import Candidate, TrialRecord, TrialState
from studies.measurement import Measurement
from studies.samplers import load_sampler
from studies.samplers.contract import RECORD
from tuner.measuring.paired import Bench, FarTooSlowError
from tuner.progress import Progress
from tuner.search.study_trials import build_problem
from tuner.search.task import Task


@dataclass(frozen=True)
class Limits:
    """Budget of a search; None is unlimited."""

    seconds: float | None = None
    """Time of preparation and trials."""
    tokens: int | None = None
    """Tokens decoded in trials, with and without drafts."""
    trials: int | None = None

    def hold(self, seconds: float, tokens: int, trials: int) -> bool:
        """Return whether the amounts are within the limits."""
        spent = ((self.seconds, seconds), (self.tokens, tokens), (self.trials, trials))
        return all(limit is None or each <= limit for limit, each in spent)


@dataclass(frozen=True)
class Trial:
    """A measured candidate; seconds and tokens are what the search had spent at its end."""

    candidate: Candidate
    speedup: float | None
    """None if it could not be measured."""
    seconds: float
    tokens: int


class Search(Protocol):
    """Proposes candidates and is told their measurements."""

    def propose(self) -> Candidate | None:
        """Return the next candidate, or None at the search's own end."""

    def observe(self, candidate: Candidate, measured: Measurement | None) -> None:
        """Learn how its trial ended."""


class OfStudy:
    """A study of ours, or a sampler of Optuna on the same space, as a `Search`."""

    def __init__(self, name: str, task: Task, bench: Bench, seed: int, seconds: float | None) -> None:
        """Costs that other runs measured are hidden from it, as reusing them would be free."""
        self._name, self._number = name, 0
        config = task.config.model_copy(update={"seed": seed})
        with TemporaryDirectory() as folder:
            own = replace(task, config=config)
            problem = build_problem(own, task.heads, bench, (), seconds, Progress(), costs_folder=Path(folder))
            self._settings = config.study_settings(name)
            self._sampler = load_sampler(name)(problem, self._settings)
            self._study = optuna.create_study(direction="maximize", sampler=self._sampler)
            self._sampler.begin(self._study)
        self._num_idle, self._best = 0, 0.0

    def propose(self) -> Candidate | None:
        """See `Search.propose`."""
        patience = self._settings.idle_limit
        if self._number >= self._settings.max_trials or (patience is not None and self._num_idle >= patience):
            return None
        if self._sampler.finished(self._study) is not None:
            return None
        self._trial = self._study.ask()
        return self._sampler.space.suggest(self._trial)

    def observe(self, candidate: Candidate, measured: Measurement | None) -> None:
        """See `Search.observe`."""
        record = TrialRecord(
            study=self._name,
            number=self._number,
            state=TrialState.FAIL if measured is None else TrialState.COMPLETE,
            candidate=candidate,
            measurement=measured,
            notes=self._sampler.notes(candidate),
        )
        self._trial.set_user_attr(RECORD, record.model_dump_json())
        self._study.tell(self._trial, record.speedup, state=None if measured else optuna.trial.TrialState.FAIL)
        self._num_idle = 0 if (record.speedup or 0.0) > self._best else self._num_idle + 1
        self._best = max(self._best, record.speedup or 0.0)
        self._number += 1


def run_search(name: str, task: Task, bench: Bench, seed: int, limits: Limits) -> Iterator[Trial]:
    """Yield the trials of a study or rival that end within the limits; preparation counts."""
    start, tokens = time.perf_counter(), 0
    search: Search
    search = RIVALS[name](bench, seed) if name in RIVALS else OfStudy(name, task, bench, seed, limits.seconds)
    indices = range(min(task.config.prompts_per_trial, len(bench.prompts)))
    known: dict[str, Measurement | None] = {}
    number = 0
    while limits.hold(time.perf_counter() - start, tokens, number + 1):
        if (candidate := search.propose()) is None:
            return
        if candidate.key not in known:
            known[candidate.key] = measured = _measured(bench, candidate, indices)
            tokens += sum(each.plain_tokens + each.draft_tokens for each in measured.samples) if measured else 0
        found = known[candidate.key]
        search.observe(candidate, found)
        number += 1
        seconds = time.perf_counter() - start
        if limits.hold(seconds, tokens, number):
            yield Trial(candidate, None if found is None else found.speedup, seconds, tokens)


def _measured(bench: Bench, candidate: Candidate, indices: range) -> Measurement | None:
    try:
        return bench.measure(candidate, indices)
    except FarTooSlowError:
        return None
