"""Runs of searches until their budget is spent, with all trials on disk.

A stopped run resumes, and its earlier spending counts. A finished run is read from disk.
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
from tuner.search.objective import Trials
from tuner.search.problem import build_problem
from tuner.search.storage import PREPARATION, StoredStudy, StudyStore
from tuner.search.task import Task

ENDED, INCUMBENTS = "ended", "incumbents"


class Limits(Document):
    """Budget of each search in a comparison; None is unlimited."""

    seconds: Duration | None = Field(None, description="time of preparing the study and of its trials")
    tokens: int | None = Field(None, ge=1, description="tokens decoded in trials, with and without drafts")
    trials: int | None = Field(None, ge=1, description="number of trials")

    def hold(self, seconds: float, tokens: int, trials: int) -> bool:
        """Return whether the amounts are within the limits."""
        spent = ((self.seconds, seconds), (self.tokens, tokens), (self.trials, trials))
        return all(limit is None or each <= limit for limit, each in spent)

    def __str__(self) -> str:
        named = ((self.seconds, "s"), (self.tokens, "tokens"), (self.trials, "trials"))
        return " or ".join(f"{limit:,g} {unit}" for limit, unit in named if limit is not None)


@dataclass(frozen=True)
class CurvePoint:
    """State of a run at the end of a trial; spending includes preparation."""

    seconds: float
    tokens: int
    trial: TrialRecord
    incumbent: TrialRecord | None
    """Best complete trial so far, as the search rated it then; None if none is faster than plain decoding."""


@dataclass(frozen=True)
class SearchRun:
    """Run of one search with one seed."""

    search: str
    seed: int
    preparation_seconds: float
    records: tuple[TrialRecord, ...]
    ended: str
    """The reason why the run ended."""
    finished_early: bool
    """True if the study finished before its budget was spent."""
    remarks: tuple[str, ...] = ()
    incumbents: tuple[int | None, ...] | None = None
    """Index of the best record after each trial, None for plain decoding; by default the best measured one."""

    def points(self) -> list[CurvePoint]:
        """Return the state of the run after each of its trials, in order."""
        found: list[CurvePoint] = []
        seconds, tokens = self.preparation_seconds, 0
        for index, record in enumerate(self.records):
            seconds += record.seconds
            tokens += decoded_tokens(record)
            found.append(CurvePoint(seconds, tokens, record, self._incumbent(index)))
        return found

    def _incumbent(self, last: int) -> TrialRecord | None:
        if self.incumbents is None:
            return _best(self.records[: last + 1], {})
        index = self.incumbents[last]
        return None if index is None else self.records[index]

    def within(self, limits: Limits) -> list[CurvePoint]:
        """Return the states after trials that ended within the budget."""
        return [p for n, p in enumerate(self.points(), 1) if limits.hold(p.seconds, p.tokens, n)]

    def spent(self, limits: Limits) -> tuple[float, int]:
        """Return the seconds and decoded tokens spent, at most `limits`.

        A trial that ended beyond the budget counts up to a limited quantity's limit, and not at all in an unlimited quantity.
        """
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
    """Return the trial with the highest expected speed-up; None unless it exceeds plain decoding."""
    best = best_trials(records, 1, expected=expected)
    is_faster = bool(best) and expected.get(best[0].candidate.key, best[0].speedup or 0.0) > 1.0
    return best[0] if is_faster else None


def decoded_tokens(record: TrialRecord) -> int:
    """Return the number of tokens that a trial decoded, with and without its draft.

    A repeat decodes none. Warm-up and passes over existing texts cost seconds, but their tokens do not count.
    """
    if record.measurement is None or record.repeat_of is not None:
        return 0
    return sum(sample.plain_tokens + sample.draft_tokens for sample in record.measurement.samples)


@dataclass
class _SearchBudget:
    """Seconds, tokens and trials of a search; earlier spending counts. See `tuner.search.budget.Limit`."""

    limits: Limits
    seconds: float
    tokens: int = 0
    trials: int = 0

    @classmethod
    def of(cls, limits: Limits, records: Sequence[TrialRecord], preparation_seconds: float) -> _SearchBudget:
        budget = cls(limits, preparation_seconds)
        for record in records:
            budget.took(record)
        return budget

    def took(self, record: TrialRecord) -> None:
        """Count a finished trial."""
        self.seconds += record.seconds
        self.tokens += decoded_tokens(record)
        self.trials += 1

    def spent(self) -> str | None:
        """Return the reason that no further trial may begin, or None."""
        limits = self.limits
        if limits.seconds is not None and self.seconds >= limits.seconds:
            return f"its {limits.seconds:g} s are spent"
        if limits.tokens is not None and self.tokens >= limits.tokens:
            return f"its {limits.tokens} tokens are spent"
        if limits.trials is not None and self.trials >= limits.trials:
            return f"all {self.trials} trials are spent"
        return None

    def overdue(self) -> str | None:
        """Return None: a trial that has begun is ended."""
        return None


@dataclass(frozen=True)
class SearchRunner:
    """Runner of searches on one problem; the seed orders the prompts of `bench`."""

    task: Task
    bench: Bench
    url: str
    """The Optuna storage of the trials."""
    limits: Limits
    progress: Progress

    def run(self, rival: Rival, seed: int) -> SearchRun:
        """Run a search until its budget is spent, resuming from its stored trials."""
        store = StudyStore(self.url, f"{rival.name}/seed {seed}")
        if (run := self._run_before(store, rival, seed)) is not None:
            self.progress.say(f"{rival.name}, seed {seed}: {len(run.records)} stored trials, nothing left to do")
            return run
        order = np.random.default_rng(seed).permutation(len(self.bench.prompts))
        bench = self.bench.reordered([int(index) for index in order])
        start = time.perf_counter()
        study = self._create(rival, seed, bench, store.kept(rival.study))
        try:
            stored = store.open(
                study, {**self.task.identity, "seed": seed}, preparation_seconds=time.perf_counter() - start
            )
        except StorageError as cause:
            raise StorageError(f"{cause} (use another --out for another comparison)") from None
        return self._finish(rival, seed, study, stored, store.noted(PREPARATION), bench)

    def _create(self, rival: Rival, seed: int, bench: Bench, kept: object) -> Study:
        """Create the study in its initial state.

        Costs measured for other runs are hidden from it, as reusing them would be free.
        """
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
            self.progress.say(f"{rival.name}, seed {seed}: {len(known)} stored trials, resuming")
            self.progress.advance(len(known))
        budget = _SearchBudget.of(self.limits, known, preparation)
        incumbents = _padded(stored.noted(INCUMBENTS), len(known))

        def keep(record: TrialRecord) -> None:
            known = stored.records()
            incumbent = _best(known, study.expected())
            numbers = [each.number for each in known]
            incumbents.append(None if incumbent is None else numbers.index(incumbent.number))
            stored.note(INCUMBENTS, incumbents)
            best = best_trials(known, 1)
            self.progress.trial(record, best[0] if best else None)

        indices = range(min(self.task.config.prompts_per_trial, len(bench.prompts)))
        records, why = Trials(study, stored, bench, indices, limit=budget, on_record=keep).run()
        finished_early = why != budget.spent()
        remarks = tuple(study.remarks())
        stored.note(
            ENDED, {"settings": _plain(rival), "why": why, "finished_early": finished_early, "remarks": remarks}
        )
        return SearchRun(rival.name, seed, preparation, tuple(records), why, finished_early, remarks, tuple(incumbents))

    def _run_before(self, store: StudyStore, rival: Rival, seed: int) -> SearchRun | None:
        """Return the run of an earlier comparison if it is complete, otherwise None."""
        noted, stored = store.noted(ENDED), store.find(rival.study)
        if noted is None or stored is None or noted["settings"] != _plain(rival):
            return None
        preparation, records = store.noted(PREPARATION), tuple(stored.records())
        budget = _SearchBudget.of(self.limits, records, preparation)
        finished_early = noted["finished_early"] and self.limits.hold(budget.seconds, budget.tokens, len(records))
        why = noted["why"] if finished_early else budget.spent()
        if why is None:
            return None
        incumbents = tuple(_padded(store.noted(INCUMBENTS), len(records)))
        return SearchRun(
            rival.name, seed, preparation, records, why, finished_early, tuple(noted["remarks"]), incumbents
        )


def _padded(incumbents: Sequence[int | None] | None, count: int) -> list[int | None]:
    """Return the stored incumbents, padded to `count`.

    A run killed right after a trial lacks the last one; the incumbent before it is repeated.
    """
    noted = list(incumbents or ())
    last = noted[-1] if noted else None
    return [*noted, *[last] * (count - len(noted))]


def _plain(rival: Rival) -> object:
    return rival.settings.model_dump(mode="json")
