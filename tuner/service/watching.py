"""The progress of a search, stored with its job; a cancelled job is interrupted where a user would press Ctrl-C."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tuner.service.contract import JobProgress
from tuner.service.jobs import Jobs

if TYPE_CHECKING:
    from studies.contract import TrialRecord

LEAST_SECONDS = 1.0
"""Seconds between two notes of mere steps, which may be many a second."""


class StoredProgress:
    """Progress of one job; see `tuner.progress.Progress`."""

    def __init__(self, jobs: Jobs, job: str) -> None:
        self._jobs, self._job = jobs, job
        self._now = JobProgress()
        self._noted = 0.0

    def stage(self, name: str, total: int | None = None) -> None:
        """See `Progress.stage`."""
        self._note(stage=name, done=0, total=total)

    def advance(self, steps: int = 1) -> None:
        """See `Progress.advance`."""
        self._now = self._now.model_copy(update={"done": self._now.done + steps})
        if time.monotonic() - self._noted > LEAST_SECONDS:
            self._note()

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """See `Progress.trial`."""
        best_draft = None if best is None else best.candidate.draft.describe()
        best_speedup = None if best is None else best.speedup
        done = self._now.done + 1
        self._note(done=done, trials=self._now.trials + 1, best_speedup=best_speedup, best_draft=best_draft)

    def show(self, text: str) -> None:
        """See `Progress.show`."""
        self._now = self._now.model_copy(update={"message": text})

    def say(self, line: str) -> None:
        """See `Progress.say`."""
        self._note(message=line)

    def _note(self, **changes: object) -> None:
        self._now = self._now.model_copy(update=changes)
        self._jobs.note_progress(self._job, self._now)
        self._noted = time.monotonic()
        if self._jobs.is_cancelled(self._job):
            raise KeyboardInterrupt
