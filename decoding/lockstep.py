"""Several texts in step: each is written as if it were alone, and passes that they ask for at the same time are run as one.

A text is a loop of `decoding.decode`, run as a coroutine (a greenlet) that is held up wherever it asks for a pass. When all are
held up, the drafting ones among their passes are run together, and again, until every text waits for its verification; then
these are run together. So each row accepts its own number of tokens at its own places, and neither drafters nor draft-length
rules know of one another. Prompts are read one by one: that is bound by arithmetic, and padding would add to it.
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
from decoding.runners import Outputs, Part, PassRequest
from decoding.target import Target

Loop = Callable[[NewCache], Iterator[Prefill | Round]]
"""Begins to write one text in a cache of the kind given."""


@torch.inference_mode()
def decode_in_lockstep(target: Target, loops: Sequence[Loop], capacity: int) -> Iterator[tuple[int, Prefill | Round]]:
    """Write the texts of `loops` in step; yields their records, each with the number of its text, as they come.

    No text may have more than `capacity` positions. The seconds in a record are those that its text has waited, for others too.
    Texts of a target whose texts cannot share a pass (`Target.unbatchable_reason` says why) take turns, a round each.
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


def _records(texts: Lockstep, loops: Sequence[Loop]) -> Iterator[tuple[int, Prefill | Round]]:
    """The records of all loops, those of a pass as soon as it was run."""
    records: list[tuple[int, Prefill | Round]] = []

    def write(row: int, loop: Loop) -> None:
        records.extend((row, step) for step in loop(partial(texts.new_cache, row)))

    with closing(texts.run([partial(write, row, loop) for row, loop in enumerate(loops)])) as passes:
        for _ in passes:
            yield from records
            records.clear()


class Lockstep:
    """Texts that share a memory, a row each; what they do at the same time is done in passes of all.

    A single text is run as ever. Of several, the target must be one whose texts can share passes (`shared_batch_size` asks it).
    """

    def __init__(self, target: Target, num_texts: int, capacity: int) -> None:
        self._target = target
        self._is_one = num_texts == 1
        # Behind all positions of a text one place is kept for what padding writes.
        self._cache = None if self._is_one else target.runner.new_cache(target.num_layers, capacity + 1, num_texts)
        self._asked: dict[int, tuple[Part, PassRequest]] = {}

    def new_cache(self, row: int, capacity: int) -> KVCache:
        """An empty cache for the text of that row, whose passes may be asked for within `run` alone."""
        if self._cache is None:
            return self._target.new_cache(capacity)
        cache = KVCache(self._target.num_layers, capacity, self._cache.storage.row(row))

        def wait(part: Part, asked: PassRequest) -> Outputs:
            self._asked[row] = part, asked
            return getcurrent().parent.switch()

        cache.lockstep = wait
        return cache

    def run(self, tasks: Sequence[Callable[[], object]]) -> Generator[None]:
        """Do the task of each row's text to its end, pausing behind every pass that was shared."""
        if self._is_one:
            tasks[0]()
            return
        running = [greenlet(task) for task in tasks]
        try:
            for task in running:
                _resume(task)
            while self._asked:
                for row, outputs in self._run_next().items():
                    _resume(running[row], outputs)
                yield
        finally:
            for task in running:
                if not task.dead:
                    task.throw()
            self._asked.clear()

    def run_to_end(self, tasks: Sequence[Callable[[], object]]) -> None:
        """The same without a pause."""
        for _ in self.run(tasks):
            pass

    def _run_next(self) -> dict[int, Outputs]:
        """Run the pass that is next, and forget that it was asked for: what comes of it, by text."""
        prompts = [row for row, (_, asked) in self._asked.items() if asked.start == 0]
        if prompts:
            row = prompts[0]
            part, asked = self._asked.pop(row)
            run = self._target.runner.run
            return {row: run(part, asked.token_ids, asked.cache, 0, last_only=asked.last_only, states=asked.states)}
        drafting = [part for part, _ in self._asked.values() if not part.verifies]
        chosen = (drafting or [part for part, _ in self._asked.values()])[0]
        passes = {row: asked for row, (part, asked) in sorted(self._asked.items()) if part is chosen}
        for row in passes:
            del self._asked[row]
        assert self._cache is not None, "a single text is not held up"
        return self._target.runner.run_shared_pass(chosen, passes, self._cache.storage)


def _resume(task: greenlet, *outputs: Outputs) -> None:
    """Let a text go on until it asks for a pass, or ends."""
    task.parent = getcurrent()
    task.switch(*outputs)


def shared_batch_size(target: Target, num_texts: int) -> int:
    """How many of so many texts share a pass: all of them, or, of a target whose texts take turns, each goes alone."""
    return num_texts if num_texts > 1 and target.unbatchable_reason is None else 1
