"""Several texts in step: each is written as if it were alone, and passes that they ask for at the same time are run as one.

A text is a loop of `decoding.decode`, run as a coroutine (a greenlet) that is held up wherever it asks for a pass. When all are
held up, the drafting ones among their passes are run together, and again, until every text waits for its verification; then
these are run together. So each row accepts its own number of tokens at its own places, and neither drafters nor draft-length
rules know of one another. Prompts are read one by one: that is bound by arithmetic, and padding would add to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from greenlet import getcurrent, greenlet

from decoding.cache import KVCache, Storage
from decoding.decode import NewCache
from decoding.rounds import Prefill, Round
from decoding.runners import Outputs, Part, PassOfOne
from decoding.target import Target

Loop = Callable[[NewCache], Iterator[Prefill | Round]]
"""Begins to write one text in a cache of the kind given."""


@torch.inference_mode()
def in_step(target: Target, loops: Sequence[Loop], capacity: int) -> Iterator[tuple[int, Prefill | Round]]:
    """Write the texts of `loops` in step; yields their records, each with the number of its text, as they come.

    No text may have more than `capacity` positions. The seconds in a record are those that its text has waited, for others too.
    Texts of a target whose texts cannot share a pass (`Target.alone` says why) take turns, a round each.
    """
    if target.alone is None and len(loops) > 1:
        yield from _Batch(target, loops, capacity).records()
        return
    writing = {row: loop(target.new_cache) for row, loop in enumerate(loops)}
    while writing:
        for row, steps in list(writing.items()):
            step = next(steps, None)
            if step is None:
                del writing[row]
            else:
                yield row, step


class _Batch:
    """Texts that share a memory, a row each."""

    def __init__(self, target: Target, loops: Sequence[Loop], capacity: int) -> None:
        self._target = target
        # Behind all positions of a text one place is kept for what padding writes.
        self._memory = Storage(target.num_layers, capacity + 1, num_rows=len(loops))
        self._records: list[tuple[int, Prefill | Round]] = []
        self._asked: dict[int, tuple[Part, PassOfOne]] = {}
        self._texts = [greenlet(partial(self._write, row, loop)) for row, loop in enumerate(loops)]

    def records(self) -> Iterator[tuple[int, Prefill | Round]]:
        """Run all texts to their ends."""
        try:
            for text in self._texts:
                self._resume(text)
            while self._asked:
                for row, outputs in self._run_next().items():
                    self._resume(self._texts[row], outputs)
                yield from self._records
                self._records.clear()
        finally:
            for text in self._texts:
                if not text.dead:
                    text.throw()

    def _write(self, row: int, loop: Loop) -> None:
        """One text, as a coroutine."""

        def new_cache(capacity: int) -> KVCache:
            cache = KVCache(self._target.num_layers, capacity, self._memory.row(row))
            cache.in_step = wait
            return cache

        def wait(part: Part, asked: PassOfOne) -> Outputs:
            self._asked[row] = part, asked
            return getcurrent().parent.switch()

        self._records.extend((row, step) for step in loop(new_cache))

    def _resume(self, text: greenlet, *outputs: Outputs) -> None:
        """Let a text go on until it asks for a pass, or ends."""
        text.parent = getcurrent()
        text.switch(*outputs)

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
        return self._target.runner.run_together(chosen, passes, self._memory)
