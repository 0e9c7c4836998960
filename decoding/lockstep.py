"""Batched decoding in lockstep: sequences advance independently and share forward passes.

Each sequence is a loop of `decoding.decode` that runs as a coroutine (a greenlet) and is suspended wherever it
requests a pass. When all are suspended, the drafting passes among the requests are run together, repeatedly, until
every sequence waits for its verification; then the verifications are run together. So each row accepts its own number
of tokens at its own positions, and neither drafters nor draft-length rules know of the other rows. Prompts are read
one by one: prefill is compute-bound, and padding would add to its work.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial

import torch
from greenlet import getcurrent, greenlet

from decoding.cache.kv_cache import KVCache
from decoding.decode import NewCache
from decoding.rounds import Prefill, Round
from decoding.runners.contract import Outputs, Part, PassRequest
from decoding.target import Target

Loop = Callable[[NewCache], Iterator[Prefill | Round]]
"""Starts to decode one sequence with the given cache factory."""


@torch.inference_mode()
def decode_in_lockstep(target: Target, loops: Sequence[Loop], capacity: int) -> Iterator[tuple[int, Prefill | Round]]:
    """Decode the sequences of `loops` in lockstep, yielding (row, record) pairs as they occur.

    No sequence may exceed `capacity` positions. The seconds in a record include the time its sequence waited for
    others. If the target's sequences cannot share passes (`Target.unbatchable_reason`), they take turns, one round
    each.
    """
    if shared_batch_size(target, len(loops)) > 1:
        yield from _records(Lockstep(target, len(loops), capacity), loops)
        return
    writing = {row: loop(target.new_cache) for row, loop in enumerate(loops)}
    while writing:
        for row, steps in list(writing.items()):
            step = next(steps, None)
            if step is None:
                del writing[row]
            else:
                yield row, step


def _records(sequences: Lockstep, loops: Sequence[Loop]) -> Iterator[tuple[int, Prefill | Round]]:
    """Yield the records of all loops, after each shared pass."""
    records: list[tuple[int, Prefill | Round]] = []

    def write(row: int, loop: Loop) -> None:
        records.extend((row, step) for step in loop(partial(sequences.new_cache, row)))

    with closing(sequences.run([partial(write, row, loop) for row, loop in enumerate(loops)])) as passes:
        for _ in passes:
            yield from records
            records.clear()


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
        self._pending: dict[int, tuple[Part, PassRequest]] = {}

    def new_cache(self, row: int, capacity: int) -> KVCache:
        """Return an empty cache for the sequence in `row`.

        Its passes may be requested within `run` only.
        """
        if self._cache is None:
            return self._target.new_cache(capacity)
        cache = KVCache(self._target.num_layers, capacity, self._cache.storage.row(row))

        def wait(part: Part, request: PassRequest) -> Outputs:
            self._pending[row] = part, request
            return getcurrent().parent.switch()

        cache.lockstep = wait
        return cache

    def run(self, tasks: Sequence[Callable[[], object]]) -> Generator[None]:
        """Run each row's task to its end, pausing after every shared pass."""
        if self._is_one:
            tasks[0]()
            return
        running = [greenlet(task) for task in tasks]
        try:
            for task in running:
                _resume(task)
            while self._pending:
                for row, outputs in self._run_next().items():
                    _resume(running[row], outputs)
                yield
        finally:
            for task in running:
                if not task.dead:
                    task.throw()
            self._pending.clear()

    def run_to_end(self, tasks: Sequence[Callable[[], object]]) -> None:
        """Run each row's task to its end without pausing."""
        for _ in self.run(tasks):
            pass

    def _run_next(self) -> dict[int, Outputs]:
        """Run the next pending pass and return its outputs by row."""
        prompts = [row for row, (_, request) in self._pending.items() if request.start == 0]
        if prompts:
            row = prompts[0]
            part, request = self._pending.pop(row)
            run = self._target.runner.run
            return {
                row: run(part, request.token_ids, request.cache, 0, last_only=request.last_only, states=request.states)
            }
        drafting = [part for part, _ in self._pending.values() if not part.verifies]
        chosen = (drafting or [part for part, _ in self._pending.values()])[0]
        passes = {row: request for row, (part, request) in sorted(self._pending.items()) if part is chosen}
        for row in passes:
            del self._pending[row]
        assert self._cache is not None, "a single sequence is never suspended"
        return self._target.runner.run_shared_pass(chosen, passes, self._cache.storage)


def _resume(task: greenlet, *outputs: Outputs) -> None:
    """Resume a sequence until it requests a pass or ends."""
    task.parent = getcurrent()
    task.switch(*outputs)


def shared_batch_size(target: Target, num_sequences: int) -> int:
    """Return how many of `num_sequences` share a pass: all, or 1 if batching is unsupported."""
    return num_sequences if num_sequences > 1 and target.unbatchable_reason is None else 1
