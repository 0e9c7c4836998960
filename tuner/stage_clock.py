"""Seconds of a command by stage, from its start on: time is charged to the innermost stage that is open."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum


class Stage(StrEnum):
    """Stages of a search, in the order of a table."""

    LOADING = "loading and checking"
    DISTILLING = "distilling exit heads"
    PLAIN = "plain decoding"
    COSTS = "timing passes"
    CHOOSING = "surveys and choosing"
    TRIALS = "trials"
    RACE = "race"
    CONFIRMATION = "confirmation"
    STOCK = "stock generation"
    WRITING = "writing and tracking"
    OTHER = "other"


class StageClock:
    """Clock that starts when it is made, and notes how many seconds each stage took.

    Stages may be nested, and entered again: a stage's seconds are all those in which it was the innermost.
    """

    def __init__(self) -> None:
        self._open = [Stage.OTHER]
        self._seconds = dict.fromkeys(Stage, 0.0)
        self._start = self._since = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._start

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Charge the seconds of this context to `stage`, less those of stages inside it."""
        self._charge()
        self._open.append(stage)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def seconds(self) -> Mapping[Stage, float]:
        """Return the seconds of each stage that took any, in the order of `Stage`; they add up to `elapsed`."""
        self._charge()
        return {stage: seconds for stage, seconds in self._seconds.items() if seconds > 0}

    def _charge(self) -> None:
        now = time.perf_counter()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now


def spoken(seconds: float) -> str:
    """Return a duration for people: 4.2 s, 42 s, 3:07 min or 2:05 h; 0.0 s for time that is overdrawn, `no limit` for infinity."""
    if math.isinf(seconds) and seconds > 0:
        return "no limit"
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 6000:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
