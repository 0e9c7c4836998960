"""Rows of a batch that sequences occupy and leave one by one: sharing passes, or taking turns.

One thread uses them. A sequence that fails ends with its error and leaves the others alone; an error of a shared pass is raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from functools import partial

from decoding.lockstep import Lockstep, Loop, shared_batch_size
from decoding.rounds import Prefill, Round
from decoding.target import Target

Event = Prefill | Round | Exception | None
"""A record of a sequence, the error that ended it, or None: it has ended."""


class SharedRows:
    """Sequences of at most `capacity` positions in lockstep: their simultaneous passes are one pass (`decoding.lockstep`).

    A row whose sequence has ended is free.
    """

    def __init__(self, target: Target, num_rows: int, capacity: int) -> None:
        self.capacity = capacity
        # A single sequence would not be suspended, and could not be left.
        self._lockstep = Lockstep(target, max(num_rows, 2), capacity)
        self._events: list[tuple[int, Event]] = []

    @property
    def running(self) -> Set[int]:
        return self._lockstep.running

    def start(self, row: int, loop: Loop) -> None:
        self._lockstep.start(row, partial(self._decode, row, loop))

    def _decode(self, row: int, loop: Loop) -> None:
        end: Exception | None = None
        try:
            for step in loop(partial(self._lockstep.new_cache, row)):
                self._events.append((row, step))
        except Exception as error:  # of this sequence only: its processors, or its settings
            end = error
        self._events.append((row, end))

    def advance(self) -> list[tuple[int, Event]]:
        """Run one shared pass, one prompt, or one transfer to the host."""
        if self.running:
            self._lockstep.advance()
        events, self._events = self._events, []
        return events

    def stop(self, row: int) -> None:
        self._lockstep.stop(row)


class TurnRows:
    """The same for sequences that cannot share passes: each runs a round in turn."""

    def __init__(self, target: Target, num_rows: int, capacity: int) -> None:
        self.capacity = capacity
        self._target = target
        self._steps: dict[int, Iterator[Prefill | Round]] = {}

    @property
    def running(self) -> Set[int]:
        return self._steps.keys()

    def start(self, row: int, loop: Loop) -> None:
        """Begin a sequence; its prompt is read in its first turn."""
        self._steps[row] = loop(self._target.new_cache)

    def advance(self) -> list[tuple[int, Event]]:
        """Run a round of each sequence."""
        events: list[tuple[int, Event]] = []
        for row, steps in list(self._steps.items()):
            try:
                event: Event = next(steps, None)
            except Exception as error:  # see SharedRows
                event = error
            if not isinstance(event, Prefill | Round):
                del self._steps[row]
            events.append((row, event))
        return events

    def stop(self, row: int) -> None:
        del self._steps[row]


def new_rows(target: Target, num_rows: int, capacity: int) -> SharedRows | TurnRows:
    """Return rows that share passes, if there are several and the target's sequences can."""
    rows = SharedRows if shared_batch_size(target, num_rows) > 1 else TurnRows
    return rows(target, num_rows, capacity)
