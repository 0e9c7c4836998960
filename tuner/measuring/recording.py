"""Decodings of a batch as they happened: the tokens of each pass and when they arrived. Compares nothing and decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.rounds import Prefill, Round
from tuner.measuring.clock import Elapsed


@dataclass(frozen=True, slots=True)
class TimedPass:
    """Tokens that one pass of the model added to a sequence, and when they had arrived."""

    tokens: tuple[int, ...]
    seconds: float
    """Seconds from the start of the batch until the tokens were on the host."""
    round: Round | None = None
    """The record of the round; None for the prefill, and for code of others, which keeps no records."""


@dataclass(frozen=True)
class TimedSequence:
    """One decoded sequence: its passes, of which the first read the prompt."""

    passes: tuple[TimedPass, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """All decoded tokens, without the prompt."""
        return tuple(token for each in self.passes for token in each.tokens)

    @property
    def first_seconds(self) -> float:
        """Seconds until the first tokens had arrived."""
        return self.passes[0].seconds

    @property
    def last_seconds(self) -> float:
        """Seconds until the last tokens had arrived."""
        return self.passes[-1].seconds

    def passes_since(self, seconds: float) -> tuple[TimedPass, ...]:
        """Return the passes after the first whose tokens arrived at `seconds` or later."""
        return tuple(each for each in self.passes[1:] if each.seconds >= seconds)


@dataclass(frozen=True)
class TimedBatch:
    """The sequences of one batch, in the order of their prompts.

    The prefill phase ends when every sequence has its first tokens; the decode phase is the rest. A contender that drafts before it
    has read the prompt (assisted generation in transformers) may deliver several first tokens: they count as prefill. So do the
    tokens that a sequence receives while the prompt of another one is still being read.
    """

    sequences: tuple[TimedSequence, ...]
    waited_seconds: float | None = None
    """Seconds in which threads of this process waited for a processor meanwhile; None if that is not known."""

    @property
    def prefill_seconds(self) -> float:
        """Seconds until every sequence had its first tokens."""
        return max(each.first_seconds for each in self.sequences)

    @property
    def decode_seconds(self) -> float:
        """Seconds from the end of the prefill phase until the last token of all sequences."""
        return max(each.last_seconds for each in self.sequences) - self.prefill_seconds

    def decoded(self, sequence: int) -> tuple[TimedPass, ...]:
        """Return the decode-phase passes of one sequence."""
        return self.sequences[sequence].passes_since(self.prefill_seconds)

    @property
    def num_decoded(self) -> int:
        """Number of decode-phase tokens, summed over the sequences."""
        return sum(len(each.tokens) for index in range(len(self.sequences)) for each in self.decoded(index))

    @property
    def prefill_tokens(self) -> int:
        """Number of tokens that arrived with the prefill, summed over the sequences."""
        return sum(len(each.tokens) for each in self.sequences) - self.num_decoded

    @property
    def rounds(self) -> Iterator[Round]:
        """The recorded rounds of the decode phase, of all sequences."""
        for index in range(len(self.sequences)):
            yield from (each.round for each in self.decoded(index) if each.round is not None)


class Recorder:
    """Records the tokens of one batch together with the seconds that had elapsed.

    `elapsed` counts from the start of the batch. The decoding loop calls `put` and reads no clock.
    """

    def __init__(self, elapsed: Elapsed, *, num_sequences: int = 1) -> None:
        self._elapsed = elapsed
        self._passes: list[list[TimedPass]] = [[] for _ in range(num_sequences)]

    def put(self, tokens: Sequence[int], sequence: int = 0, record: Round | None = None) -> None:
        """Record at least one token of a sequence that has just arrived on the host; the prefill's tokens come first."""
        self._passes[sequence].append(TimedPass(tuple(tokens), self._elapsed(record), record))

    def batch(self) -> TimedBatch:
        """Return everything recorded. Raises ValueError if a sequence has received no token."""
        if not all(self._passes):
            raise ValueError("not a single token was handed over")
        return TimedBatch(tuple(TimedSequence(tuple(passes)) for passes in self._passes))


def counted(lengths: Iterable[int]) -> tuple[int, ...]:
    """Return the number of lengths that are 0, 1, 2 ..., up to the longest."""
    counts = Counter(lengths)
    return tuple(counts[length] for length in range(max(counts, default=-1) + 1))


def record_decoding(decoder: Decoder, requests: Sequence[Request], recorder: Recorder) -> None:
    """Decode the requests as one batch in lockstep and record every step as it happens."""
    for sequence, step in decoder.batch_steps(requests):
        if isinstance(step, Prefill):
            recorder.put((step.token,), sequence)
        else:
            recorder.put(step.tokens, sequence, step)
