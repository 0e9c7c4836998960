"""What the server has seen lately, as numbers: to judge its profiles, and to tune the next ones. Texts only if they are kept."""

from __future__ import annotations

import time
from collections import deque
from itertools import count
from threading import Lock
from typing import Any
from uuid import uuid4

from decoding.arms.windows import TimedWindow
from decoding.rounds import Prefill, Round
from decoding.serving.kept_texts import KeptTexts
from decoding.serving.waiting_room import Job, RequestEnd

MOST_RECORDS = 1000
"""Windows and requests that are kept; older ones are dropped."""


class Observations:
    """The latest windows of rounds and the latest requests. Any thread may use it.

    `server` and a number identify each of them, so that a client that reads them repeatedly counts none twice. A server that is
    started again has another `server`.
    """

    def __init__(self, limit: int = MOST_RECORDS, texts: KeptTexts | None = None) -> None:
        self.server = uuid4().hex
        self.texts = texts
        """The texts of late requests; None unless the operator wants them kept."""
        self._window_numbers, self._request_numbers = count(1), count(1)
        self._windows: deque[dict[str, Any]] = deque(maxlen=limit)
        self._requests: deque[dict[str, int]] = deque(maxlen=limit)
        self._num_new: dict[Job, int] = {}
        self._lock = Lock()

    def window(self, arm: str, window: TimedWindow) -> None:
        """Keep a window of an arm. A listener of `ArmedDecoder`."""
        record = {
            "number": next(self._window_numbers),
            "ended": round(time.time(), 3),
            "arm": arm,
            "sequences": round(window.num_running, 2),
            "rounds": window.num_rounds,
            "context": None if window.context is None else round(window.context, 1),
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
        if self.texts is not None:
            self.texts.observe(job, event)
        if isinstance(event, Prefill):
            self._num_new[job] = 1
        elif isinstance(event, Round):
            self._num_new[job] += len(event.tokens)
        elif job in self._num_new:
            lengths = {"prompt_tokens": len(job.request.prompt), "new_tokens": self._num_new.pop(job)}
            record = {"number": next(self._request_numbers), **lengths}
            with self._lock:
                self._requests.append(record)

    def document(self) -> dict[str, Any]:
        """Return all that is kept, the oldest first, without texts."""
        with self._lock:
            return {"server": self.server, "windows": list(self._windows), "requests": list(self._requests)}
