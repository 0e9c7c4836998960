"""The limit on a distillation's time: texts, training of all groups and evaluations together (our formulation)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tuner.heads.texts import GeneratedText

WRITING_SHARE = 0.4
"""Most of the time that writing training texts may take; training does the rest."""
EVALUATION_MARGIN = 1.5
"""Seconds of evaluating exits with their heads, over those of evaluating them without."""


class TimeLimit:
    """Seconds that a distillation may take, None if unlimited; those of stored texts count too."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._start = time.perf_counter()
        self._before = 0.0

    @classmethod
    def least_of(cls, *limits: float | None) -> TimeLimit:
        return cls(min((limit for limit in limits if limit is not None), default=None))

    def allows_text(self, least_tokens: int) -> Callable[[Sequence[GeneratedText]], bool]:
        """Return the question asked before each batch of texts; `least_tokens` are written whatever the time."""

        def may_go_on(texts: Sequence[GeneratedText]) -> bool:
            if self.seconds is None or sum(len(text.response) for text in texts) < least_tokens:
                return True
            return sum(text.seconds for text in texts) < WRITING_SHARE * self.seconds

        return may_go_on

    def count_stored(self, texts: Sequence[GeneratedText], seconds_here: float) -> None:
        """Count the seconds of texts that an earlier run generated: all but the `seconds_here` spent on them in this run."""
        self._before += max(0.0, sum(text.seconds for text in texts) - seconds_here)

    @property
    def spent(self) -> float:
        return self._before + time.perf_counter() - self._start

    def for_group(self, num_heads: int, num_left: int, evaluation_seconds: float) -> float | None:
        """Return the seconds of training `num_heads` of the `num_left` heads that are left, or None if unlimited.

        `evaluation_seconds` were taken by evaluating all exits without heads.
        At least one step is always trained.
        """
        if self.seconds is None:
            return None
        left = self.seconds - self.spent - EVALUATION_MARGIN * evaluation_seconds
        return max(1e-3, left * num_heads / num_left)
