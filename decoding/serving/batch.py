"""Continuous batching in a thread: a row is filled again as soon as its sequence has ended, between two passes of the others.

Each sequence is what it would be alone. Prompts are read one by one. One waiting request is admitted before each shared pass, so
that the sequences that are being decoded wait for one prompt at most.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import Thread

import torch

from decoding.decoder import Decoder
from decoding.errors import first_line
from decoding.lockstep import Event, new_rows
from decoding.rounds import Prefill, Round
from decoding.serving.control import DraftControl, controlled
from decoding.serving.waiting_room import Job, RequestEnd, Stopped, WaitingRoom

IDLE_SECONDS = 0.5
"""Longest sleep without work; a request ends it at once."""
LAST_SECONDS = 2.0
"""Time that the latest pass has to end when the thread is stopped."""

Observer = Callable[[Job, Prefill | Round | RequestEnd], None]
"""Told what every job's listener is told."""

log = logging.getLogger(__name__)


class ContinuousBatch:
    """Decodes the jobs of a waiting room in `num_rows` rows, each of at most `max_length` tokens, prompt and new ones.

    `control` says when rounds draft, and is told how fast they are; without it they always do. A `fresh` job always drafts: its
    samples would depend on time. One thread calls `advance`; any thread may use the room. With a persistent draft-length rule a row
    keeps its controller from one sequence to the next.
    """

    def __init__(
        self,
        decoder: Decoder,
        room: WaitingRoom,
        *,
        num_rows: int,
        max_length: int,
        control: DraftControl | None = None,
        observer: Observer | None = None,
    ) -> None:
        if num_rows < 1:
            raise ValueError(f"a batch has at least one row, got {num_rows}")
        self.num_rows, self.max_length = num_rows, max_length
        self._room = room
        self._observer = observer
        self._jobs: dict[int, Job] = {}
        self._free = deque(range(num_rows))
        self.decoder, self.control = decoder, control
        self._controlled = decoder if control is None else controlled(decoder, control)
        self._capacity = max_length + max(decoder.max_drafted, decoder.target.runner.exact_width or 0) + 1
        self._rows = new_rows(decoder.target, num_rows, self._capacity)

    @property
    def num_running(self) -> int:
        return len(self._jobs)

    @torch.inference_mode()  # around `stop` too: a sequence that is dropped leaves the mode in which it was resumed
    def advance(self) -> bool:
        """Admit a job and do the next piece of work. Return False if there is nothing to do."""
        self._leave_cancelled()
        reads_prompt = self._admit()
        if not self._jobs:
            return False
        if self.control is not None:
            self.control.choose(min(len(self._jobs) + len(self._room), self.num_rows))
        start, num_running = time.perf_counter(), len(self._jobs)
        try:
            events = self._rows.advance()
        except Exception as error:  # a shared pass: no sequence can go on, but the next ones can
            self._fail_all(error)
            return True
        if self.control is not None and not reads_prompt and not any(job.fresh for job in self._jobs.values()):
            rounds = [event for _, event in events if isinstance(event, Round)]
            self.control.observe(num_running, rounds, time.perf_counter() - start)
        for row, event in events:
            self._settle(row, event)
        return True

    @torch.inference_mode()
    def close(self) -> None:
        for row in list(self._jobs):
            self._rows.stop(row)
            self._end(row, RequestEnd(Stopped.CLOSED, "the server is shutting down"))
        while (job := self._room.take()) is not None:
            self._tell(job, RequestEnd(Stopped.CLOSED, "the server is shutting down"))

    def _leave_cancelled(self) -> None:
        for job in self._room.take_cancelled():
            self._tell(job, RequestEnd(Stopped.CANCELLED))
        for row, job in list(self._jobs.items()):
            if job.is_cancelled:
                self._rows.stop(row)
                self._end(row, RequestEnd(Stopped.CANCELLED))

    def _admit(self) -> bool:
        """Begin the job that has waited longest, if a row is free; return True if one has begun."""
        job = self._room.take() if self._free else None
        if job is None:
            return False
        length = len(job.request.prompt) + job.request.ending.max_new_tokens
        if length > self.max_length:
            too_long = f"prompt and new tokens are {length}, and the server takes {self.max_length}"
            self._tell(job, RequestEnd(Stopped.FAILED, too_long))
            return False
        row = self._free.popleft()
        self._jobs[row] = job
        decoder = self.decoder if job.fresh else self._controlled
        self._rows.start(row, partial(decoder.loop, job.request, row, fresh=job.fresh))
        return True

    def _settle(self, row: int, event: Event) -> None:
        if isinstance(event, Prefill | Round):
            self._tell(self._jobs[row], event)
        elif event is None:
            self._end(row, RequestEnd())
        else:
            self._end(row, RequestEnd(Stopped.FAILED, f"{type(event).__name__}: {first_line(event)}"))

    def _fail_all(self, error: Exception) -> None:
        """End the running jobs and begin anew with empty rows."""
        for row in list(self._rows.running):
            self._rows.stop(row)
        for row in list(self._jobs):
            self._end(row, RequestEnd(Stopped.FAILED, f"{type(error).__name__}: {first_line(error)}"))
        self._rows = new_rows(self.decoder.target, self.num_rows, self._capacity)

    def _end(self, row: int, end: RequestEnd) -> None:
        self._tell(self._jobs.pop(row), end)
        self._free.append(row)

    def _tell(self, job: Job, event: Prefill | Round | RequestEnd) -> None:
        if self._observer is not None:
            self._observer(job, event)
        job.listener(event)


class DecodingThread:
    """Advances a batch while there is work, in a thread of its own."""

    def __init__(self, batch: ContinuousBatch, room: WaitingRoom) -> None:
        self.batch, self.room = batch, room
        self._thread = Thread(target=self._run, name="decoding", daemon=True)

    @property
    def is_alive(self) -> bool:
        """True while requests are being decoded or could be."""
        return self._thread.is_alive() and not self.room.is_closed

    def start(self) -> None:
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """True until the latest pass has ended."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End all requests and the thread, after the present pass if it takes no longer than a moment."""
        self.room.close()
        if self._thread.is_alive():
            self._thread.join(LAST_SECONDS)

    def _run(self) -> None:
        try:
            while not self.room.is_closed:
                if not self.batch.advance():
                    self.room.wait(IDLE_SECONDS)
        except BaseException:
            log.exception("the decoding thread has failed")
            raise
        finally:
            self.room.close()
            self.batch.close()
