"""A continuous batch run by hand: what each request was told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from decoding.decode import Request
from decoding.rounds import Prefill, Round
from decoding.serving.batch import ContinuousBatch
from decoding.serving.control import DraftControl
from decoding.serving.waiting_room import Job, RequestEnd, WaitingRoom


@dataclass
class Told:
    """The tokens of a request so far, and its end."""

    tokens: list[int] = field(default_factory=list)
    end: RequestEnd | None = None

    def __call__(self, event: Prefill | Round | RequestEnd) -> None:
        assert self.end is None, "the end comes last"
        if isinstance(event, RequestEnd):
            self.end = event
        else:
            self.tokens += [event.token] if isinstance(event, Prefill) else event.tokens


class HandControl(DraftControl):
    """Drafts when the test says so; plain at first."""

    drafts = False  # type: ignore[assignment]  # a property of the class above

    def choose(self, num_sequences: int) -> None:
        """Leave the choice to the test."""

    def observe(self, num_running: int, rounds: Sequence[Round], seconds: float) -> None:
        """Learn nothing."""


def arrive(room: WaitingRoom, request: Request, *, fresh: bool = False) -> tuple[Job, Told]:
    """Let a request wait; return its job and what it is told."""
    told = Told()
    job = Job(request, told, fresh=fresh)
    room.put(job)
    return job, told


def passes(batch: ContinuousBatch) -> Iterator[int]:
    """Advance until nothing is left, yielding the number of the pass."""
    number = 0
    while batch.advance():
        number += 1
        assert number < 5000, "the batch does not end"
        yield number


def serve_all(batch: ContinuousBatch, room: WaitingRoom, requests: Iterable[Request]) -> list[tuple[int, ...]]:
    """Decode requests that arrive at once; return their tokens."""
    told = [arrive(room, request)[1] for request in requests]
    for _ in passes(batch):
        pass
    assert all(each.end == RequestEnd() for each in told)
    return [tuple(each.tokens) for each in told]
