"""The trials of studies, on one or more devices: of one study alone, or of several that take turns.

The devices are filled while any study can propose a candidate beside its running trials. The study with the fewest running trials
is asked first, so that studies share the devices equally.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from studies.contract import Study, TrialRecord
from tuner.executors.contract import Executor, TrialDevice
from tuner.search.budget import Budget
from tuner.search.storage import StoredStudy
from tuner.search.study_run import OnRecord, StudyRun


class StudyTurns:
    """Studies that take turns on the devices of one executor. A context manager, at whose end no trial is left without a state."""

    def __init__(self, studies: Iterator[StudyRun], executor: Executor[TrialDevice]) -> None:
        """Each of `studies` is made when those before it leave this process nothing to do, or when its end is asked for."""
        self._later, self._executor = studies, executor
        self._runs: list[StudyRun] = []
        """In the order in which they got their last turn."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for run in self._runs:
            run.abandon()

    def until_ended(self, name: str) -> StudyRun:
        """Run trials, of the other studies too, until the study `name` has ended, and return it."""
        while (found := self._ended(name)) is None:
            if not (self._begin() or self._make_next()):
                self._finish_one()
        return found

    def _ended(self, name: str) -> StudyRun | None:
        return next((run for run in self._runs if run.study.name == name and run.ended is not None), None)

    def _begin(self) -> bool:
        """Begin a trial, if a device is free and any study proposes a candidate. Return True also if a study has ended."""
        num_pending = sum(run.num_pending for run in self._runs)
        # The number of devices is asked for when there is a trial: the first one opens them.
        if num_pending and num_pending >= self._executor.num_devices:
            return False
        under_way = [run for run in self._runs if run.ended is None]
        for run in sorted(under_way, key=lambda each: each.num_pending):
            if run.begin():
                self._runs.remove(run)
                self._runs.append(run)
                return True
            if run.ended is not None:
                return True
        return False

    def _make_next(self) -> bool:
        """Make the next study, and return False if there is none."""
        run = next(self._later, None)
        if run is not None:
            self._runs.append(run)
        return run is not None

    def _finish_one(self) -> None:
        """Wait for a trial and finish it."""
        if any(run.take_over() for run in self._runs):
            return
        task, result = self._executor.wait()
        is_known = any(run.finish(task, result) for run in self._runs)
        assert is_known, f"{task} belongs to a study"


def run_study(
    study: Study,
    stored: StoredStudy,
    executor: Executor[TrialDevice],
    indices: Sequence[int],
    budget: Budget,
    on_record: OnRecord,
    *,
    most_repeats: int = 0,
) -> tuple[list[TrialRecord], str]:
    """Run `study` until it is finished or `budget` is spent, with trials on the prompts (or batches) at `indices`.

    Returns all records, by number, and the reason for the end. Other processes may run trials of the same study: it learns from
    their records too, before its next trial. `on_record` gets the records made here. A disturbed trial is measured again,
    `most_repeats` times at most.
    """
    run = StudyRun(study, stored, executor, indices, budget, on_record, most_repeats=most_repeats)
    with StudyTurns(iter([run]), executor) as turns:
        turns.until_ended(study.name)
    assert run.ended is not None, "it ran until it had ended"
    return stored.records(), run.ended
