"""Batched decoding in lockstep: sequences advance independently and share forward passes.

Each sequence is a loop of `decoding.decode` that runs as a coroutine (a greenlet) and is suspended wherever it
requests a pass or reads from the device. When all are suspended, all reads are one transfer. Without reads, the drafting
passes among the requests are run together, repeatedly, until every sequence waits for its verification; then the
verifications are run together. So each row accepts its own number of tokens at its own positions, neither drafters nor
draft-length rules know of the other rows, and the number of waits for the device does not depend on the number of
sequences. Prompts are read one by one: prefill is compute-bound, and padding would add to its work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.decode import NewCache
from decoding.rounds import Prefill, Round
from decoding.runners.contract import Outputs, Part, PassRequest, Written, one_token
from decoding.target import Target
from decoding.token_memory import BatchTokens, TokenRow

Loop = Callable[[NewCache], Iterator[Prefill | Round]]
"""Starts to decode one sequence with the given cache factory."""
Event = Prefill | Round | Exception | None
"""A record of a sequence, the error that ended it, or None: it has ended."""


@torch.inference_mode()
def decode_in_lockstep(target: Target, loops: Sequence[Loop], capacity: int) -> Iterator[tuple[int, Prefill | Round]]:
    """Decode the sequences of `loops` in lockstep, yielding (row, record) pairs as they occur.

    No sequence may exceed `capacity` positions. The seconds in a record include the time its sequence waited for
    others. If the target's sequences cannot share passes (`Target.unbatchable_reason`), they take turns, one round
    each.
    """
    rows = new_rows(target, len(loops), capacity)
    try:
        for row, loop in enumerate(loops):
            rows.start(row, loop)
        while (events := rows.advance()) or rows.running:
            for row, event in events:
                if isinstance(event, Exception):
                    raise event
                if event is not None:
                    yield row, event
    finally:
        for row in list(rows.running):
            rows.stop(row)


class SharedRows:
    """Sequences of at most `capacity` positions in lockstep: their simultaneous passes are one pass.

    A row whose sequence has ended is free.
    """

    def __init__(self, target: Target, num_rows: int, capacity: int) -> None:
        self._lockstep = Lockstep(target, num_rows, capacity)
        self.running = self._lockstep.running
        self._events: list[tuple[int, Event]] = []

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
        self._target = target
        self._steps: dict[int, Iterator[Prefill | Round]] = {}
        self.running: Set[int] = self._steps.keys()

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


class Lockstep:
    """Sequences that share one cache storage, one row each, and run simultaneous passes as one.

    A single sequence runs as usual. For several, the target's sequences must be able to share passes (see
    `shared_batch_size`).
    """

    def __init__(self, target: Target, num_sequences: int, capacity: int) -> None:
        self._target = target
        self._is_one = num_sequences == 1
        # One slot after the last position absorbs the writes of padding.
        self._cache = None if self._is_one else target.runner.new_cache(target.num_layers, capacity + 1, num_sequences)
        self._tokens = BatchTokens(num_sequences, capacity, target.device)
        self._passes: dict[int, _Pass] = {}
        self._reads: dict[int, Tensor] = {}
        self._running: dict[int, greenlet] = {}
        self.running: Set[int] = self._running.keys()
        """The rows whose task has not ended."""

    def new_cache(self, row: int, capacity: int) -> KVCache:
        """Return an empty cache for the sequence in `row`.

        Its passes may be requested within `run` only.
        """
        if self._cache is None:
            return self._target.new_cache(capacity)
        if len(self._running) <= 1:  # the first of a batch: the others begin with it
            self._target.follow_weights()
        cache = KVCache(self._target.num_layers, capacity, self._cache.storage.row(row))
        cache.company = _Row(row, self._tokens.row(row), self._passes, self._reads)
        return cache

    def run(self, tasks: Sequence[Callable[[], object]]) -> None:
        """Run each row's task to its end."""
        if self._is_one:
            tasks[0]()
            return
        try:
            for row, task in enumerate(tasks):
                self.start(row, task)
            while self._running:
                self.advance()
        finally:
            for row in list(self._running):
                self.stop(row)

    def start(self, row: int, task: Callable[[], object]) -> None:
        """Run a task in a free row until it requests a pass or a read, or ends. Not for a single sequence."""
        # Writes of the row's last sequence may be pending, at positions that the new one writes too.
        self._tokens.finish()
        self._running[row] = greenlet(task)
        self._resume(row)

    def advance(self) -> None:
        """Answer the requests that most sequences can share next, and run these sequences up to their next requests."""
        for row, answer in self._answers().items():
            self._resume(row, answer)

    def stop(self, row: int) -> None:
        """End the task of a row where it waits; the row is free."""
        self._passes.pop(row, None)
        self._reads.pop(row, None)
        task = self._running.pop(row)
        task.parent = getcurrent()
        task.throw()

    def _resume(self, row: int, *answer: object) -> None:
        """Resume a sequence until it requests something or ends."""
        task = self._running[row]
        task.parent = getcurrent()
        try:
            task.switch(*answer)
        finally:
            if task.dead:
                del self._running[row]

    def _answers(self) -> Mapping[int, object]:
        """Do what the most sequences can share next; return the answers by row."""
        prompt = next((row for row, each in self._passes.items() if each.request.start == 0), None)
        if prompt is not None:
            return {prompt: self._run_prompt(self._passes.pop(prompt))}
        return self._read() if self._reads else self._run_shared()

    def _run_prompt(self, pending: _Pass) -> Outputs:
        self._tokens.finish()
        asked, run = pending.request, self._target.runner.run
        return run(pending.part, asked.token_ids, asked.cache, 0, last_only=asked.last_only, states=asked.states)

    def _read(self) -> dict[int, list[Any]]:
        """Copy what all sequences want to read, in one transfer for each data type: rounding must not change a token."""
        found: dict[int, list[Any]] = {}
        for dtype in {values.dtype for values in self._reads.values()}:
            alike = {row: values for row, values in self._reads.items() if values.dtype == dtype}
            numbers = iter(torch.cat(list(alike.values())).tolist())
            found |= {row: list(islice(numbers, values.shape[0])) for row, values in alike.items()}
        self._reads.clear()
        return found

    def _run_shared(self) -> Mapping[int, Outputs | Written]:
        """Run the next pending passes together, drafts first."""
        drafting = [each.part for each in self._passes.values() if not each.part.verifies]
        chosen = (drafting or [each.part for each in self._passes.values()])[0]
        pending = {row: each for row, each in sorted(self._passes.items()) if each.part is chosen}
        for row in pending:
            del self._passes[row]
        self._tokens.finish()
        assert self._cache is not None, "a single sequence is never suspended"
        runner, memory = self._target.runner, self._cache.storage
        passes = {row: each.request for row, each in pending.items()}
        lengths = [each.num_tokens for each in pending.values() if each.num_tokens is not None]
        if len(lengths) == len(pending):
            return runner.write_together(chosen, passes, memory, min(lengths))
        outputs = runner.run_shared_pass(chosen, passes, memory)
        return {
            row: outputs[row] if each.num_tokens is None else one_token(outputs[row]) for row, each in pending.items()
        }


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass that a sequence waits for."""

    part: Part
    request: PassRequest
    num_tokens: int | None = None
    """Number of greedy tokens that the sequence wants to draft, or None if it wants the outputs of one pass."""


class _Row:
    """The other sequences of a batch, as one of them meets them: it is suspended until its request is answered."""

    def __init__(self, row: int, tokens: TokenRow, passes: dict[int, _Pass], reads: dict[int, Tensor]) -> None:
        self.tokens = tokens
        self._row, self._passes, self._reads = row, passes, reads

    def run(self, part: Part, request: PassRequest) -> Outputs:
        self._passes[self._row] = _Pass(part, request)
        outputs: Outputs = getcurrent().parent.switch()
        return outputs

    def write(self, part: Part, request: PassRequest, num_tokens: int) -> Written:
        self._passes[self._row] = _Pass(part, request, num_tokens)
        written: Written = getcurrent().parent.switch()
        return written

    def read(self, values: Tensor) -> list[Any]:
        self._reads[self._row] = values
        numbers: list[Any] = getcurrent().parent.switch()
        return numbers


def shared_batch_size(target: Target, num_sequences: int) -> int:
    """Return how many of `num_sequences` share a pass: all, or 1 if batching is unsupported."""
    return num_sequences if num_sequences > 1 and target.unbatchable_reason is None else 1
