"""Recordings of decodings, real or made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tuner.measuring.clock import WallClock
from tuner.measuring.recording import Recorder, TimedPass, TimedSequence


def real_recorder(num_sequences: int = 1) -> Recorder:
    """Record real seconds from now on."""
    return Recorder(WallClock(torch.device("cpu")).start(), num_sequences=num_sequences)


def timed_sequence(passes: Sequence[tuple[int, ...]], seconds: Sequence[float]) -> TimedSequence:
    """Return a sequence whose passes gave these tokens at these seconds."""
    return TimedSequence(tuple(TimedPass(*each) for each in zip(passes, seconds, strict=True)))
