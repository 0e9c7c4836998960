"""What the server has seen lately, as numbers without any text: to judge its profiles, and to tune the next ones."""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Any

from decoding.arms.windows import TimedWindow
from decoding.rounds import Prefill, Round
from decoding.serving.waiting_room import Job, RequestEnd

MOST_RECORDS = 1000
"""Windows and requests that are kept; older ones are dropped."""


class Observations:
    """The latest windows of rounds and the latest requests. Any thread may use it."""

    def __init__(self, limit: int = MOST_RECORDS) -> None:
        self._windows: deque[dict[str, Any]] = deque(maxlen=limit)
        self._requests: deque[dict[str, int]] = deque(maxlen=limit)
        self._num_new: dict[Job, int] = {}
        self._lock = Lock()

    def window(self, arm: str, window: TimedWindow) -> None:
        """Keep a window of an arm. A listener of `ArmedDecoder`."""
        record = {
            "arm": arm,
            "sequences": round(window.num_running, 2),
            "rounds": window.num_rounds,
            "tokens": window.num_tokens,
            "seconds": round(window.seconds, 6),
            "tokens_per_second": round(window.tokens_per_second, 2),
            "drafted": window.num_drafted,
            "accepted_lengths": list(window.accepted_lengths),
        }
        with self._lock:
            self._windows.append(record)

    def observe(self, job: Job, event: Prefill | Round | RequestEnd) -> None:
        """Count the tokens of a request until its end. An observer of the batch."""
        if isinstance(event, Prefill):
            self._num_new[job] = 1
        elif isinstance(event, Round):
            self._num_new[job] += len(event.tokens)
        elif job in self._num_new:
            record = {"prompt_tokens": len(job.request.prompt), "new_tokens": self._num_new.pop(job)}
            with self._lock:
                self._requests.append(record)

    def document(self) -> dict[str, Any]:
        """Return all that is kept, the oldest first."""
        with self._lock:
            return {"windows": list(self._windows), "requests": list(self._requests)}
