"""One search of a comparison, run until its budget is spent, its trials on disk: what a run has spent, and what it had found.

A run goes on where it was stopped, and what it had spent before counts. One whose budget is spent is read, not made again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from pydantic import Field

from decoding.documents.strict_yaml import Document, Duration
from studies.contract import Study, TrialRecord, best_trials
from studies.searches.registry import create_study
from tuner.errors import ConfigError, StorageError
from tuner.evaluation.searches.rivals import Rival
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.search.problem import build_problem
from tuner.search.storage import PREPARATION, StoredStudy, StudyStore
from tuner.search.task import Task
from tuner.search.trials import Budget, run_study

ENDED, INCUMBENTS = "ended", "incumbents"


class Limits(Document):
    """What each search of a comparison may spend; what is None is not limited."""

    seconds: Duration | None = Field(None, description="of preparing the study and of its trials")
    tokens: int | None = Field(None, ge=1, description="decoded in measuring, plainly and with drafts")
    trials: int | None = Field(None, ge=1)

    def hold(self, seconds: float, tokens: int, trials: int) -> bool:
        """Whether so much lies within them."""
        spent = ((self.seconds, seconds), (self.tokens, tokens), (self.trials, trials))
        return all(limit is None or each <= limit for limit, each in spent)

    def __str__(self) -> str:
        named = ((self.seconds, "s"), (self.tokens, "tokens"), (self.trials, "trials"))
        return " or ".join(f"{limit:,g} {unit}" for limit, unit in named if limit is not None)


@dataclass(frozen=True)
class CurvePoint:
    """A run when a trial had ended: what it had spent, its preparation included, and the best it had found."""

    seconds: float
    tokens: int
    trial: TrialRecord
    incumbent: TrialRecord | None
    """The best complete trial so far, as the search saw it then; None: plain decoding, no trial being faster."""


@dataclass(frozen=True)
class SearchRun:
    """What one search did with one seed."""

    search: str
    seed: int
    preparation_seconds: float
    records: tuple[TrialRecord, ...]
    ended: str
    """Why no further trial was run."""
    ended_itself: bool
    """It said that it was finished, before its budget was spent."""
    remarks: tuple[str, ...] = ()
    incumbents: tuple[int | None, ...] | None = None
    """Behind each trial, the place among the records of the best one, or None for plain decoding; if not given, it is the one
    that measured best."""

    def points(self) -> list[CurvePoint]:
        """The run after each of its trials, the first first."""
        found: list[CurvePoint] = []
        seconds, tokens = self.preparation_seconds, 0
        for place, record in enumerate(self.records):
            seconds += record.seconds
            tokens += decoded_tokens(record)
            found.append(CurvePoint(seconds, tokens, record, self._incumbent(place)))
        return found

    def _incumbent(self, last: int) -> TrialRecord | None:
        if self.incumbents is None:
            return _best(self.records[: last + 1], {})
        place = self.incumbents[last]
        return None if place is None else self.records[place]

    def within(self, limits: Limits) -> list[CurvePoint]:
        """The trials that had ended within the budget: one that was begun within it may have ended beyond."""
        return [p for n, p in enumerate(self.points(), 1) if limits.hold(p.seconds, p.tokens, n)]

    def spent(self, limits: Limits) -> tuple[float, int]:
        """Seconds and decoded tokens, no more than `limits`: of a trial that ended beyond one of them only what lies within
        it counts, and of the other nothing."""
        counted = self.within(limits)
        seconds = counted[-1].seconds if counted else self.preparation_seconds
        tokens = counted[-1].tokens if counted else 0
        last = self.points()[-1] if self.records else None
        if limits.seconds is not None:
            seconds = min(last.seconds if last else seconds, limits.seconds)
        if limits.tokens is not None:
            tokens = min(last.tokens if last else tokens, limits.tokens)
        return seconds, tokens


def _best(records: Sequence[TrialRecord], expected: Mapping[str, float]) -> TrialRecord | None:
    """The trial of which most is expected, or None if that is no more than of plain decoding."""
    best = best_trials(records, 1, expected=expected)
    is_faster = bool(best) and expected.get(best[0].candidate.key, best[0].speedup or 0.0) > 1.0
    return best[0] if is_faster else None


def decoded_tokens(record: TrialRecord) -> int:
    """The tokens that a trial decoded to be measured, plainly and with its draft; a repeat decodes none.

    Warming up, teaching a rule and passes over texts that are there already decode none either: their seconds count.
    """
    if record.measurement is None or record.repeat_of is not None:
        return 0
    return sum(sample.plain_tokens + sample.draft_tokens for sample in record.measurement.samples)


@dataclass
class _Spending(Budget):
    """A budget in seconds that also knows tokens; what was spent before counts."""

    tokens: int | None = None
    spent_tokens: int = 0

    @classmethod
    def of(cls, limits: Limits, records: Sequence[TrialRecord], preparation_seconds: float) -> _Spending:
        spent = preparation_seconds + sum(record.seconds for record in records)
        return cls(limits.trials, limits.seconds, spent, limits.tokens, sum(map(decoded_tokens, records)))

    def exhausted(self, num_trials: int) -> str | None:
        """See `Budget.exhausted`."""
        if self.seconds is not None and self.spent_seconds >= self.seconds:
            return f"its {self.seconds:g} s are spent"
        if self.tokens is not None and self.spent_tokens >= self.tokens:
            return f"its {self.tokens} tokens are spent"
        return super().exhausted(num_trials)


@dataclass(frozen=True)
class SearchRunner:
    """Runs searches on one problem: the prompts of `bench`, in an order that the seed says."""

    task: Task
    bench: Bench
    url: str
    """The Optuna storage of the trials."""
    limits: Limits
    progress: Progress

    def run(self, rival: Rival, seed: int) -> SearchRun:
        """The whole run of a search: what is stored of it, and what its budget still allows."""
        store = StudyStore(self.url, f"{rival.name}/seed {seed}")
        if (run := self._run_before(store, rival, seed)) is not None:
            self.progress.say(f"{rival.name}, seed {seed}: {len(run.records)} trials found, nothing left to spend")
            return run
        order = np.random.default_rng(seed).permutation(len(self.bench.prompts))
        bench = self.bench.reordered([int(place) for place in order])
        start = time.perf_counter()
        study = self._create(rival, seed, bench, store.kept(rival.study))
        try:
            stored = store.open(
                study, {**self.task.identity, "seed": seed}, preparation_seconds=time.perf_counter() - start
            )
        except StorageError as cause:
            raise StorageError(f"{cause} (searches are kept apart by another --out)") from None
        return self._finish(rival, seed, study, stored, store.noted(PREPARATION), bench)

    def _create(self, rival: Rival, seed: int, bench: Bench, kept: object) -> Study:
        """The study at its beginning. Costs that were measured for another run are not known to it, or they would be free."""
        with TemporaryDirectory() as folder:
            problem = build_problem(
                self.task,
                self.task.heads,
                bench,
                (),
                self.limits.seconds,
                self.progress,
                costs_folder=Path(folder),
            )
            try:
                return create_study(rival.study, replace(problem, seed=seed), rival.settings, kept)
            except ValueError as cause:
                raise ConfigError(f"search {rival.name}: {cause}") from None

    def _finish(
        self, rival: Rival, seed: int, study: Study, stored: StoredStudy, preparation: float, bench: Bench
    ) -> SearchRun:
        known = stored.records()
        if known:
            self.progress.say(f"{rival.name}, seed {seed}: {len(known)} finished trials found, going on from there")
            self.progress.advance(len(known))
        budget = _Spending.of(self.limits, known, preparation)
        incumbents = _padded(stored.noted(INCUMBENTS), len(known))

        def keep(record: TrialRecord) -> None:
            known.append(record)
            budget.spent_tokens += decoded_tokens(record)
            incumbent = _best(known, study.expected())
            numbers = [each.number for each in known]
            incumbents.append(None if incumbent is None else numbers.index(incumbent.number))
            stored.note(INCUMBENTS, incumbents)
            best = best_trials(known, 1)
            self.progress.trial(record, best[0] if best else None)

        places = range(min(self.task.config.prompts_per_trial, len(bench.prompts)))
        records, why = run_study(study, stored, bench, places, budget, keep)
        itself = why != budget.exhausted(len(records))
        remarks = tuple(study.remarks())
        stored.note(ENDED, {"settings": _plain(rival), "why": why, "itself": itself, "remarks": remarks})
        return SearchRun(rival.name, seed, preparation, tuple(records), why, itself, remarks, tuple(incumbents))

    def _run_before(self, store: StudyStore, rival: Rival, seed: int) -> SearchRun | None:
        """A run of an earlier comparison for which nothing is left to do."""
        noted, stored = store.noted(ENDED), store.find(rival.study)
        if noted is None or stored is None or noted["settings"] != _plain(rival):
            return None
        preparation, records = store.noted(PREPARATION), tuple(stored.records())
        budget = _Spending.of(self.limits, records, preparation)
        itself = noted["itself"] and self.limits.hold(budget.spent_seconds, budget.spent_tokens, len(records))
        why = noted["why"] if itself else budget.exhausted(len(records))
        if why is None:
            return None
        incumbents = tuple(_padded(store.noted(INCUMBENTS), len(records)))
        return SearchRun(rival.name, seed, preparation, records, why, itself, tuple(noted["remarks"]), incumbents)


def _padded(incumbents: Sequence[int | None] | None, count: int) -> list[int | None]:
    """The incumbents noted; a run killed right behind a trial lacks the last, for which the one before it stands."""
    noted = list(incumbents or ())
    last = noted[-1] if noted else None
    return [*noted, *[last] * (count - len(noted))]


def _plain(rival: Rival) -> object:
    return rival.settings.model_dump(mode="json")
