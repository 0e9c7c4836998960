"""Passes after a prompt that is in the cache, timed between plain passes: what every cost of a draft step is measured by."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.lockstep import Lockstep
from decoding.target import Target
from decoding.text import TokenSequence

T = TypeVar("T")


class Stopwatch:
    """Seconds of work on one device. Passes on an accelerator return before they are done, so each reading waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        """Wait for the device and read the clock, in seconds."""
        self.synchronize()
        return time.perf_counter()

    def time(self, work: Callable[[], object]) -> float:
        """Run `work` and return the seconds that it took on host and device."""
        start = self.now()
        work()
        return self.now() - start

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work, so that it is not counted to what follows."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@dataclass(eq=False)
class Prompted:
    """A sequence whose prompt is in the cache, with one token after it that is not."""

    text: TokenSequence
    cache: KVCache

    def ahead(self, width: int) -> Tensor:
        """Return the next `width` tokens, [1, width]."""
        return self.text.span(self.cache.length, self.cache.length + width)


class PromptedBatch:
    """Sequences in lockstep, each after a prompt that the model has read. Call within `torch.inference_mode`."""

    def __init__(
        self,
        target: Target,
        texts: Sequence[Sequence[int]],
        num_read: int,
        capacity: int,
        read: Callable[[TokenSequence, KVCache], object] | None = None,
    ) -> None:
        """Read the first `num_read` tokens of each text, by `read` in place of the target if it is given.

        The next token is the sequence's last, and tokens after it are written as drafts.
        """
        self.watch = Stopwatch(target.device)
        self._lockstep = Lockstep(target, len(texts), capacity)
        self.sequences = []
        for row, tokens in enumerate(texts):
            cache = self._lockstep.new_cache(row, capacity)
            cache.only_best = True  # costs are those of greedy decoding
            text = TokenSequence(tokens[:num_read], capacity, target.device, cache.company)
            self.sequences.append(Prompted(text, cache))

        def read_prompt(sequence: Prompted) -> None:
            text, cache = sequence.text, sequence.cache
            if read is None:
                target.forward(text.span(0, num_read), cache, 0, last_only=True)
            else:
                read(text, cache)

        self.all(read_prompt)
        for sequence, tokens in zip(self.sequences, texts, strict=True):
            sequence.cache.length = num_read
            sequence.text.append(tokens[num_read : num_read + 1])
            if following := tokens[num_read + 1 :]:
                sequence.text.write_drafts(following)

    def all(self, work: Callable[[Prompted], T]) -> list[T]:
        """Do the work for every sequence in lockstep, and return the results in order."""
        done: dict[int, T] = {}

        def do(row: int) -> None:
            done[row] = work(self.sequences[row])

        self._lockstep.run([partial(do, row) for row in range(len(self.sequences))])
        return [done[row] for row in range(len(self.sequences))]

    def seconds(self, work: Callable[[Prompted], object]) -> float:
        """Return the seconds of the work for all sequences."""
        return self.watch.time(lambda: self.all(work))


def between_plain(
    plain: Callable[[], float], passes: Sequence[Callable[[], T]], *, at_once: int = 1
) -> Iterator[tuple[T, float]]:
    """Run passes, `at_once` between two plain ones; yield each result with the mean seconds of the plain passes beside it.

    Decoding alternates between them too: repeating one pass would find warm processor caches and take a few per cent less. A
    shared machine is slower for seconds at a time, by half where memory is the limit, and slow periods must not look like
    differences between passes.
    """
    before = plain()
    for start in range(0, len(passes), at_once):
        done = [run() for run in passes[start : start + at_once]]
        after = plain()
        yield from ((each, (before + after) / 2) for each in done)
        before = after
