"""The supervisor of the benchmark: one worker process runs the steps in order, and is replaced when it dies.

An error of CUDA spoils the process in which it happens, and models are expensive to make. So all steps share one process
as long as it lives; the steps after the one in which it died run in a fresh one. A step that exceeds its time is first
interrupted as by Ctrl-C, so that a search still writes its best profile, and killed if it does not end then.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tuner.evaluation.gpu.contract import GpuStep
from tuner.evaluation.gpu.records import StepRecord, StepRecords
from tuner.progress import Progress, Unwatched

GRACE_SECONDS = 10.0
"""Seconds between the interrupt of a step and the end of its process."""


@dataclass(frozen=True)
class Started:
    """The worker has begun a step."""

    name: str


@dataclass(frozen=True)
class Finished:
    """The worker has written the record of a step."""

    name: str


@dataclass(frozen=True)
class Ended:
    """The worker's process has ended."""

    reason: str


Event = Started | Finished | Ended


class Worker(Protocol):
    """A process that runs steps."""

    def wait(self, seconds: float) -> Event | None:
        """Return the next event, or None if there is none within `seconds`."""

    def interrupt(self) -> None:
        """Interrupt the step that is running."""

    def kill(self) -> None:
        """End the process at once, and the processes that it started."""


OpenWorker = Callable[[Sequence[str], Mapping[str, float]], Worker]
"""Starts a worker on the named steps; each must end at its time, in seconds of `time.time`."""


def deadlines(steps: Sequence[GpuStep], start: float, seconds: float) -> dict[str, float]:
    """Return when each step must have ended: what a step leaves of its limit is for the steps after it."""
    ends = itertools.accumulate(step.limit_seconds for step in steps)
    return {step.name: start + min(end, seconds) for step, end in zip(steps, ends, strict=True)}


class Supervisor:
    """Runs steps that have not succeeded yet, each once, within `seconds` together."""

    def __init__(
        self,
        steps: Sequence[GpuStep],
        records: StepRecords,
        open_worker: OpenWorker,
        *,
        seconds: float,
        clock: Callable[[], float] = time.time,
        progress: Progress = Unwatched(),  # noqa: B008 - has no state
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_step` is called whenever a step has ended and its record is on disk."""
        self._records = records
        self._open_worker = open_worker
        self._clock = clock
        self._progress = progress
        self._on_step = on_step
        self._end = clock() + seconds
        self._deadlines = deadlines(steps, clock(), seconds)
        self._waiting = list(records.unfinished([step.name for step in steps]))

    def run(self) -> tuple[str, ...]:
        """Run the steps; return the names of those for which no time was left."""
        self._progress.stage("steps", len(self._waiting))
        while self._waiting and self._clock() < self._end:
            worker = self._open_worker(tuple(self._waiting), self._deadlines)
            try:
                self._watch(worker)
            finally:
                worker.kill()
        return tuple(self._waiting)

    def _watch(self, worker: Worker) -> None:
        """Follow a worker to its end, or until no step or no time is left."""
        began, is_idle, has_finished = self._clock(), True, False
        while self._waiting and self._clock() < self._end:
            due = self._waiting[0]  # running, or about to: starting the process counts as well
            # A step before it that did not end in time may have taken all of its time.
            event = worker.wait(max(0.0, self._deadlines[due] - self._clock()))
            if event is None and self._interrupt(worker, due):
                event = Finished(due)
            match event:
                case None:
                    self._close(StepRecord(name=due, status="given up", seconds=self._clock() - began, cause=_KILLED))
                    return
                case Started(name):
                    self._progress.show(name)
                    began, is_idle = self._clock(), False
                case Finished():
                    self._next()
                    is_idle, has_finished = True, True
                case Ended() if is_idle and has_finished:
                    return  # it gave itself up, because an error had spoilt it
                case Ended(reason):
                    self._close(StepRecord(name=due, status="died", seconds=self._clock() - began, cause=reason))
                    return

    def _interrupt(self, worker: Worker, name: str) -> bool:
        """Interrupt the step; return whether it has ended with a record of its own."""
        worker.interrupt()
        until = self._clock() + GRACE_SECONDS
        while (left := until - self._clock()) > 0:
            event = worker.wait(left)
            if event == Finished(name):
                return True
            if event is None or isinstance(event, Ended):
                return False
        return False

    def _close(self, record: StepRecord) -> None:
        """Write the record of a step that could not write its own."""
        self._records.write(record)
        self._next()

    def _next(self) -> None:
        del self._waiting[0]
        self._progress.advance()
        self._on_step()


_KILLED = f"out of time: interrupted, and killed as it did not end within {GRACE_SECONDS:.0f} s"
