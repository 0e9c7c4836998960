"""Ways of drafting that an engine has itself, with the number of drafted tokens free; lookups can be replayed on known texts.

What a lookup copies is determined by the text so far, so that its rounds on a text that the model has written are known without
decoding. Lookups of engines differ: each class here follows the source of one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Entry = tuple[int, int, int]
"""First and last number of requests side by side, and the tokens to draft there."""
Flags = Callable[[int, Sequence[Entry] | None], tuple[str, ...]]
"""Returns the flags of drafts of up to a number of tokens, with a schedule of lengths where the engine has one."""
EXPORTED = "the profile's export"
"""Name of the method that is a profile's draft as it was exported."""
WIDTH = array("i").itemsize


class CopySource(Protocol):
    """Where the tokens come from that an engine's lookup copies."""

    def start(self, text: array[int]) -> int | None:
        """Return the position of `text` from which tokens are copied; None if nothing matches."""

    def count(self, start: int, length: int, most: int) -> int:
        """Return how many of at most `most` tokens are copied from `start` of a text of `length` tokens."""


@dataclass(frozen=True)
class EarliestMatch:
    """vLLM's `ngram` (`vllm/v1/spec_decode/ngram_proposer.py`, 0.32): the longest n-gram that matches, at its earliest position."""

    longest: int
    shortest: int

    def start(self, text: array[int]) -> int | None:
        """See `CopySource.start`."""
        for size in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            found = find(text[:-1], text[-size:])
            if found is not None:
                return found + size
        return None

    def count(self, start: int, length: int, most: int) -> int:
        """See `CopySource.count`."""
        return min(most, length - start)


@dataclass(frozen=True)
class LatestMatch:
    """llama.cpp's `ngram-simple` (`common/ngram-map.cpp`, build 11434): one length of n-grams, at its latest position.

    The last token is neither matched nor copied, and nothing is drafted that is shorter than the n-gram.
    """

    size: int

    def start(self, text: array[int]) -> int | None:
        """See `CopySource.start`."""
        if len(text) < self.size + 2:
            return None
        found = find(text[1:-2], text[-self.size :], last=True)
        return None if found is None else found + 1 + self.size

    def count(self, start: int, length: int, most: int) -> int:
        """See `CopySource.count`."""
        copied = min(most, length - 1 - start)
        return copied if copied >= self.size and length - 1 > self.size + most + 1 else 0


def find(text: array[int], wanted: array[int], *, last: bool = False) -> int | None:
    """Return the first or last position at which `wanted` lies in a text, both of token ids; None if it does not."""
    where, whole = wanted.tobytes(), text.tobytes()
    at = whole.rfind(where) if last else whole.find(where)
    while at % WIDTH and at >= 0:  # a match that begins within a token is none
        at = whole.rfind(where, 0, at + len(where) - 1) if last else whole.find(where, at + 1)
    return None if at < 0 else at // WIDTH


@dataclass(frozen=True)
class Method:
    """A way of drafting that an engine has itself."""

    name: str
    kind: str
    """What shares the costs of drafting, such as all ranges of n-grams."""
    lengths: tuple[int, ...]
    """Numbers of drafted tokens to choose from, ascending."""
    flags: Flags = field(repr=False, compare=False)
    lookup: CopySource | None = None
    """None for what cannot be replayed: its acceptance is measured."""
    has_schedule: bool = False
    """True if a server may draft another number of tokens for each number of requests side by side."""
    runs_model: bool = False
    """True if each drafted token takes a pass of a draft model."""


@dataclass(frozen=True)
class Rounds:
    """What continuing a text, or several, takes."""

    count: float
    drafted: float


class Replay:
    """A text that the model has written after a prompt, and the rounds in which a lookup would have written it."""

    def __init__(self, prompt: Sequence[int], written: Sequence[int]) -> None:
        self._text = array("i", [*prompt, *written])
        self._first = len(prompt) + 1  # the prefill writes the first token
        self._starts: dict[tuple[CopySource, int], int | None] = {}

    def rounds(self, lookup: CopySource, most: int) -> Rounds:
        """Return the rounds with drafts of up to `most` tokens; those without a match draft nothing."""
        text, at, count, drafted = self._text, self._first, 0, 0
        while at < len(text):
            start = self._start(lookup, at)
            copied = 0 if start is None else lookup.count(start, at, most)
            accepted = 0
            while start is not None and accepted < copied and at + accepted < len(text):
                if text[start + accepted] != text[at + accepted]:
                    break
                accepted += 1
            count, drafted, at = count + 1, drafted + copied, at + accepted + 1
        return Rounds(count, drafted)

    def _start(self, lookup: CopySource, at: int) -> int | None:
        if (lookup, at) not in self._starts:
            self._starts[lookup, at] = lookup.start(self._text[:at])
        return self._starts[lookup, at]
