"""Requests from their arrival to their end, and the room in which they wait for a free row of the batch.

The only state that the decoding thread shares with others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from threading import Condition

from decoding.errors import SdtuneError
from decoding.rounds import Prefill, Round
from decoding.text import Request


class WaitingRoomFullError(SdtuneError):
    """As many requests wait as may, or the room `is_closed`."""

    def __init__(self, message: str, *, is_closed: bool = False) -> None:
        super().__init__(message)
        self.is_closed = is_closed


class Stopped(StrEnum):
    """Why a sequence ended early."""

    CANCELLED = "cancelled"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The end of a request: by itself if `stopped` is None."""

    stopped: Stopped | None = None
    reason: str = ""


Listener = Callable[[Prefill | Round | RequestEnd], None]
"""Takes the next record of a sequence, or its end, which comes exactly once and last.

Called by the decoding thread: it must return at once and must not raise.
"""


class Job:
    """A request that waits or is decoded. `fresh` gives it a draft-length controller of its own, so that it is reproducible."""

    def __init__(self, request: Request, listener: Listener, *, fresh: bool = False) -> None:
        self.request, self.listener, self.fresh = request, listener, fresh
        self.arrived = time.perf_counter()
        self.is_cancelled = False


class WaitingRoom:
    """Jobs in order of arrival, at most `limit`. Any thread may use it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._jobs: deque[Job] = deque()
        self._changed = Condition()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def put(self, job: Job) -> None:
        """Let a job wait. Raises `WaitingRoomFullError` if the room is full or closed."""
        with self._changed:
            if self._is_closed:
                raise WaitingRoomFullError("the server is shutting down", is_closed=True)
            if len(self._jobs) >= self.limit:
                raise WaitingRoomFullError(
                    f"{len(self._jobs)} requests are waiting, the most that may: try again later"
                )
            self._jobs.append(job)
            self._changed.notify_all()

    def take(self) -> Job | None:
        with self._changed:
            return self._jobs.popleft() if self._jobs else None

    def cancel(self, job: Job) -> None:
        """Ask for the end of a job, wherever it is."""
        with self._changed:
            job.is_cancelled = True
            self._changed.notify_all()

    def take_cancelled(self) -> list[Job]:
        """Return the cancelled jobs that wait no more."""
        with self._changed:
            found = [job for job in self._jobs if job.is_cancelled]
            for job in found:
                self._jobs.remove(job)
            return found

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until a job comes, one is cancelled or the room is closed; at most `seconds`."""
        with self._changed:
            if not self._jobs and not self._is_closed:
                self._changed.wait(seconds)
