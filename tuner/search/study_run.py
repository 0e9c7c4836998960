"""One study under way: asks for a candidate, has it measured by real decoding, stores the record, tells the study.

A candidate whose output differs from plain decoding is a failed trial, whatever its speed; so is one that raises. A trial that
looks worse than the best, prompt by prompt, is pruned. A repeated candidate takes over the earlier measurement. When the next trial
begins, and which study it belongs to, is decided in `tuner.search.trials`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optuna

from studies.contract import Candidate, Study, TrialRecord, TrialState
from tuner.executors.contract import Executor, TrialDevice
from tuner.freed_memory import large_blocks_given_back
from tuner.search.budget import Budget
from tuner.search.storage import StoredStudy
from tuner.search.trial_run import Outcome, TrialWork

OnRecord = Callable[[TrialRecord], None]


@dataclass(frozen=True)
class _Pending:
    """A trial that was begun and whose record is not written yet."""

    trial: optuna.Trial
    candidate: Candidate
    notes: dict[str, Any]
    choosing_seconds: float


@dataclass(frozen=True)
class _Timed:
    """The outcome of a trial, and how long the device took."""

    outcome: Outcome
    seconds: float


class StudyRun:
    """A study with the trials that are measured now, and the seconds of choosing that are charged to none yet."""

    def __init__(
        self,
        study: Study,
        stored: StoredStudy,
        executor: Executor[TrialDevice],
        indices: Sequence[int],
        budget: Budget,
        on_record: OnRecord,
        *,
        most_repeats: int = 0,
    ) -> None:
        """See `tuner.search.trials.run_study`."""
        self.study = study
        self.ended: str | None = None
        """Reason for the end; None before."""
        self._stored, self._executor, self._on_record = stored, executor, on_record
        self._indices, self._budget, self._most_repeats = indices, budget, most_repeats
        self._known: set[int] = set()
        self._pending: dict[int, _Pending] = {}
        """By number: trials that have no record yet. Each is submitted to the executor, deferred, or taken over."""
        self._submitted: dict[str, int] = {}
        """Numbers of the trials that the executor runs, by the names of its tasks."""
        self._deferred: list[int] = []
        """Trials of candidates that another trial measures now: they may take its measurement over."""
        self._taken_over: deque[tuple[int, _Timed]] = deque()
        """Trials that have taken a measurement over."""
        self._waits = False
        """True if the study proposes nothing before another of its trials has ended."""
        self._choosing = 0.0
        self._learn()

    @property
    def num_pending(self) -> int:
        """Number of trials that were begun and have no record yet."""
        return len(self._pending)

    def begin(self) -> bool:
        """Begin a trial and return True, unless the study has to wait for a running one, or ends: see `ended`."""
        if self._waits or self.ended is not None:
            return False
        with self._counted():
            reason = self._why_none_begins()
        if reason is None:
            self._begin()
            return True
        if self._pending:
            self._waits = True
        else:
            self.ended = reason
        return False

    def take_over(self) -> bool:
        """Finish a trial that has taken a measurement over, and return False if there is none."""
        if not self._taken_over:
            return False
        self._finish(*self._taken_over.popleft())
        return True

    def finish(self, task: str, result: Any) -> bool:
        """Finish the trial that the executor ran as `task`, and return False if it is not one of this study."""
        number = self._submitted.pop(task, None)
        if number is None:
            return False
        self._finish(number, result)
        return True

    def abandon(self) -> None:
        """Close the trials that end without a record."""
        for pending in self._pending.values():
            self._stored.abandon(pending.trial)

    def _why_none_begins(self) -> str | None:
        # The budget first: a study may compute for long before it answers.
        if (spent := self._budget.exhausted(len(self._known) + len(self._pending))) is not None:
            return spent
        candidates = [each.candidate for each in self._pending.values()]
        if candidates and not self.study.proposes_beside(candidates):
            return "the study waits for the trials that are running"
        return self.study.finished()

    def _begin(self) -> None:
        """Ask for a candidate and have it measured. Its seconds count from when the study began to choose it."""
        with self._counted():
            trial = self._stored.ask()
            try:
                with large_blocks_given_back():
                    candidate, notes = self.study.propose(trial)
            except BaseException:
                self._stored.abandon(trial)
                raise
        self._pending[trial.number] = _Pending(trial, candidate, notes, self._choosing)
        self._choosing = 0.0
        self._measure(trial.number)

    def _measure(self, number: int) -> None:
        """Have a trial measured, unless an earlier trial measured the same candidate or does so now."""
        trial, candidate = self._pending[number].trial, self._pending[number].candidate
        if any(self._pending[other].candidate.key == candidate.key for other in self._submitted.values()):
            self._deferred.append(number)
            return
        start = time.perf_counter()
        if (known := _repeated(trial, candidate, self._stored.records())) is not None:
            self._taken_over.append((number, _Timed(known, time.perf_counter() - start)))
            return
        measured = TrialWork(
            trial, self._stored, candidate, self._indices, self._budget, most_repeats=self._most_repeats
        )

        def work(device: TrialDevice) -> _Timed:
            start = time.perf_counter()
            outcome = measured(device)
            return _Timed(outcome, time.perf_counter() - start)

        task = f"trial {number} of {self.study.name}"
        self._submitted[task] = number
        self._executor.submit(task, work)

    def _finish(self, number: int, timed: _Timed) -> None:
        """Write a trial to disk and learn from it."""
        pending, outcome = self._pending.pop(number), timed.outcome
        self._waits = False
        record = TrialRecord(
            study=self.study.name,
            number=number,
            candidate=pending.candidate,
            state=outcome.state,
            measurement=outcome.measurement,
            reason=outcome.reason,
            repeat_of=outcome.repeat_of,
            notes={**pending.notes, **outcome.notes},
            seconds=pending.choosing_seconds + timed.seconds,
        )
        # On disk before the study learns of it: a kill from here on loses nothing.
        self._stored.finish(pending.trial, record)
        self._budget.spend(record)
        # Learning from this trial and choosing the next count with the next; showing the record counts with none.
        with self._counted():
            self._learn()
        deferred, self._deferred = self._deferred, []
        for waiting in deferred:
            self._measure(waiting)
        self._on_record(record)

    def _learn(self) -> None:
        """Let the study observe the records that it does not know, by number, and close the trials of dead processes."""
        self._stored.sweep()
        for record in self._stored.records():
            if record.number not in self._known:
                self._known.add(record.number)
                with large_blocks_given_back():
                    self.study.observe(record)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the seconds of this context as those of choosing the next candidate."""
        start = time.perf_counter()
        yield
        self._choosing += time.perf_counter() - start


def _repeated(trial: optuna.Trial, candidate: Candidate, earlier: Sequence[TrialRecord]) -> Outcome | None:
    """Return the outcome of an earlier trial of the same candidate, or None. A failed trial is not taken over."""
    same = (record for record in earlier if record.candidate.key == candidate.key and record.repeat_of is None)
    known = next((record for record in same if record.state is not TrialState.FAIL), None)
    if known is None:
        return None
    for sample in known.measurement.samples if known.measurement else ():
        trial.report(sample.ratio, step=sample.prompt)
    return Outcome(known.state, known.measurement, repeat_of=known.number)
