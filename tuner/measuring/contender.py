"""What a bench times: contenders, each a way of decoding prompts, the clock, and the record of what one of them decoded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from decoding.drafts import Draft
from decoding.rounds import Round
from decoding.timing.passes import Stopwatch

PLAIN, PROFILE = "plain", "profile"
"""Names of the contender that decodes without drafts, the baseline of all others, and of the one under test."""

Prompts = Sequence[Sequence[int]]
"""Token ids of the prompts of one batch."""


Elapsed = Callable[[Round | None], float]
"""Seconds since a decoding started, read when tokens arrive: with the record of their round, or None if there is none."""
Price = Callable[[Draft, Round], float]
"""Seconds to charge for a round of this draft."""


class WallClock:
    """Times real decoding on one device. Called once per decoding, just before it starts.

    Tokens are on the host when seconds are read, so only the start of a decoding waits for the device.
    """

    is_deterministic = False

    def __init__(self, device: torch.device) -> None:
        self._stopwatch = Stopwatch(device)

    def start(self, draft: Draft | None = None) -> Elapsed:
        """Wait for the device and return a function that reads real seconds."""
        start = self._stopwatch.now()
        return lambda record: time.perf_counter() - start


class PriceList:
    """Charges a fixed price for every round that really happened, in place of measured seconds.

    Searches can then be checked without the noise of a real clock (the simulation mode of Kernel Tuner). The prefill is free. The
    sequences of a batch are charged one after another, as if they shared no passes.
    """

    is_deterministic = True
    """A repeated decoding takes exactly the same time, so that nothing is gained by repeating or warming up."""

    def __init__(self, price: Price) -> None:
        self._price = price

    def start(self, draft: Draft | None = None) -> Elapsed:
        """Return a function that reads the prices charged so far.

        Raises ValueError without a draft: there are no rounds to charge for.
        """
        if draft is None:
            raise ValueError("a price list charges for the rounds of a draft, got none")
        charged = 0.0

        def read(record: Round | None) -> float:
            nonlocal charged
            if record is not None:
                charged += self._price(draft, record)
            return charged

        return read


Clock = WallClock | PriceList


@dataclass(frozen=True)
class Decoded:
    """The sequences that a contender decoded for one batch, with seconds and sums over the whole batch.

    The prefill phase ends when every sequence has its first tokens; the decode phase is the rest. A contender that drafts before it
    has read the prompt (assisted generation in transformers) may deliver several first tokens: they count as prefill. So do the
    tokens that a sequence receives while the prompt of another one is still being read.
    """

    texts: tuple[tuple[int, ...], ...]
    """Tokens of each sequence; of a contender that samples, those of a greedy run, which can be compared."""
    prefill_seconds: float
    prefill_tokens: int
    decode_seconds: float
    decode_tokens: int
    rounds: int = 0
    """Passes that verified drafts, or, of code of others that keeps no record of them, all passes of the decode phase."""
    drafted: int | None = 0
    """Number of drafted tokens; None for code of others, which keeps no records."""
    accepted: int = 0
    accepted_lengths: tuple[int, ...] = ()
    """Number of rounds that accepted 0, 1, 2 ... tokens."""
    drafting_seconds: float | None = None
    """Part of `decode_seconds` spent drafting; None if that is not known."""
    waited_seconds: float | None = None
    """Seconds in which threads of this process waited for a processor meanwhile; None if that is not known."""


class _Pass(NamedTuple):
    """Tokens that one pass of the model added to a sequence, and when they had arrived."""

    tokens: tuple[int, ...]
    seconds: float
    round: Round | None


class Recorder:
    """Records the tokens of one batch together with the seconds that had elapsed.

    `elapsed` counts from the start of the batch. The decoding loop calls `put` and reads no clock.
    """

    def __init__(self, elapsed: Elapsed, *, num_sequences: int = 1) -> None:
        self._elapsed = elapsed
        self._sequences: list[list[_Pass]] = [[] for _ in range(num_sequences)]

    def put(self, tokens: Sequence[int], sequence: int = 0, record: Round | None = None) -> None:
        """Record at least one token of a sequence that has just arrived on the host; the prefill's tokens come first.

        `record` is None for the prefill, and for code of others, which keeps no records.
        """
        self._sequences[sequence].append(_Pass(tuple(tokens), self._elapsed(record), record))

    def decoded(self) -> Decoded:
        """Return everything recorded. Raises ValueError if a sequence has received no token."""
        if not all(self._sequences):
            raise ValueError("not a single token was handed over")
        prefill_seconds = max(passes[0].seconds for passes in self._sequences)
        decode = [each for passes in self._sequences for each in passes[1:] if each.seconds >= prefill_seconds]
        texts = tuple(tuple(token for each in passes for token in each.tokens) for passes in self._sequences)
        decode_tokens = sum(len(each.tokens) for each in decode)
        rounds = [each.round for each in decode if each.round is not None]
        is_recorded = len(rounds) == len(decode)
        accepted = [each.num_accepted for each in rounds] if is_recorded else [len(each.tokens) - 1 for each in decode]
        return Decoded(
            texts=texts,
            prefill_seconds=prefill_seconds,
            prefill_tokens=sum(map(len, texts)) - decode_tokens,
            decode_seconds=max(passes[-1].seconds for passes in self._sequences) - prefill_seconds,
            decode_tokens=decode_tokens,
            rounds=len(decode),
            drafted=sum(each.num_drafted for each in rounds) if is_recorded else None,
            accepted=sum(accepted),
            accepted_lengths=histogram(accepted),
            drafting_seconds=sum(each.draft_seconds for each in rounds)
            if is_recorded and len(self._sequences) == 1
            else None,
        )


class Contender(Protocol):
    """A way of continuing prompts greedily.

    The contender decides how the model is run; the bench decides on the prompts, the lengths, the turns and the counting.
    """

    @property
    def name(self) -> str:
        """Name, unique in a bench."""

    @property
    def description(self) -> str:
        """One line for a table."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything needed to repeat the run: plain data for JSON."""

    def prepare(self, batches: Sequence[Prompts], max_new_tokens: int) -> None:
        """Do what is done once for batches of these sizes and lengths, so that no batch is charged for it."""

    def decode(self, prompts: Prompts, max_new_tokens: int) -> Decoded:
        """Continue `prompts` as one batch, timed, and leave no trace on the model.

        Each sequence ends with an end-of-text token of the model or after `max_new_tokens`. May raise anything if it cannot.
        """


def reason_of(cause: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    message = str(cause).strip().split("\n")[0][:160]
    return f"{type(cause).__name__}: {message}" if message else type(cause).__name__


def histogram(lengths: Iterable[int]) -> tuple[int, ...]:
    """Return the number of lengths that are 0, 1, 2 ..., up to the longest."""
    found = list(lengths)
    return tuple(found.count(length) for length in range(max(found, default=-1) + 1))
