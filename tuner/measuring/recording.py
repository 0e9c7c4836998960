"""Decodings of a batch as they happen: the tokens of each pass and when they arrived. Compares nothing and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.rounds import Prefill, Round
from tuner.measuring.clock import Elapsed
from tuner.measuring.contender import Decoded, histogram


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


def record_decoding(decoder: Decoder, requests: Sequence[Request], recorder: Recorder) -> None:
    """Decode the requests as one batch in lockstep and record every step as it happens."""
    for sequence, step in decoder.batch_steps(requests):
        if isinstance(step, Prefill):
            recorder.put((step.token,), sequence)
        else:
            recorder.put(step.tokens, sequence, step)
