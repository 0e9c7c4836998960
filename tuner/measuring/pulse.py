"""The rate of a model's passes, from a moment of plain decoding: enough to estimate minutes, not to compare drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decoding.acceptance import Greedy
from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.target import Target
from decoding.text import Ending
from tuner.measuring.clock import WallClock
from tuner.measuring.recording import Recorder, record_decoding

PULSE_TOKENS, WARMING_TOKENS = 6, 2
"""Tokens of a decoding that is timed, and of an uncounted one before it."""
NUM_PULSES = 2
"""Timed decodings, of which the faster counts: one slow moment of a shared machine must not refuse a search."""


@dataclass(frozen=True)
class Pulse:
    """Measured seconds of the target's passes, over one sequence or over a batch in lockstep."""

    prefill_seconds: float
    """Seconds of reading the prompts."""
    token_seconds: float
    """Seconds of a pass over one position of each sequence."""
    num_positions: int
    """Positions of the prompts."""

    @property
    def position_seconds(self) -> float:
        """Seconds per position of a wide pass."""
        return self.prefill_seconds / self.num_positions


def measure_pulse(
    target: Target, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, num_sequences: int
) -> Pulse:
    """Decode a few tokens after the prompt of median length, or after `num_sequences` prompts about it in lockstep."""
    by_length = sorted(prompts, key=len)
    middle = len(by_length) // 2
    chosen = [by_length[min(middle + row, len(by_length) - 1)] for row in range(num_sequences)]
    plain = plain_decoder(target)
    plain.prepare(min(map(len, chosen)), max(map(len, chosen)) + max_new_tokens, num_sequences)
    timed: list[tuple[float, float]] = []
    for num_tokens in (WARMING_TOKENS, *[min(PULSE_TOKENS, max_new_tokens)] * NUM_PULSES):
        recorder = Recorder(WallClock(target.device).start(), num_sequences=num_sequences)
        ending = Ending(num_tokens, frozenset())
        record_decoding(plain, [Request(prompt, ending, Greedy()) for prompt in chosen], recorder)
        batch = recorder.decoded()
        num_passes = max(1, batch.decode_tokens // num_sequences)
        timed.append((batch.prefill_seconds, batch.decode_seconds / num_passes))
    prefills, tokens = zip(*timed[1:], strict=True)
    return Pulse(min(prefills), min(tokens), sum(map(len, chosen)))
