"""The speed-up over plain decoding of requests that are served, from an engine's steps (our formulation). Knows nothing of vLLM."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial
from statistics import median

LEAST, MOST = 6, 30
"""Plain steps with a number of requests that must be known, and the latest ones that count, by their median."""
KEPT = 0.999
"""Share of the sums that remains after a step: about the last thousand count."""


@dataclass
class _Sums:
    seconds: float = 0.0
    in_plain: float = 0.0
    """Seconds of plain decoding for the same tokens."""

    def add(self, seconds: float, in_plain: float) -> None:
        self.seconds, self.in_plain = KEPT * self.seconds + seconds, KEPT * self.in_plain + in_plain


class Pace:
    """What the steps of an engine take, beside what plain decoding would take for their tokens."""

    def __init__(self) -> None:
        self._plain = defaultdict[int, deque[float]](partial(deque, maxlen=MOST))
        """Seconds of plain steps by the number of requests."""
        self._all = defaultdict[int, _Sums](_Sums)
        """All steps by the bits of that number."""
        self._before: tuple[int, float] | None = None
        """Requests and seconds of the last step if it verified no drafts."""

    def step(self, num_requests: int, num_tokens: int, seconds: float, *, drafted: bool) -> None:
        """Count a step in which each of the requests has written, `num_tokens` in all; `drafted` if it verified drafts."""
        before, self._before = self._before, None if drafted else (num_requests, seconds)
        plain = self._plain[num_requests]
        if not drafted and before is not None and before[0] == num_requests:
            # A step also drafts for the next one: of two plain steps in a row, the first did not.
            plain.append(before[1])
        if len(plain) >= LEAST:
            self._all[num_requests.bit_length()].add(seconds, num_tokens / num_requests * median(plain))

    def interrupt(self) -> None:
        """Leave out a step that read a prompt, or in which some requests waited."""
        self._before = None

    @property
    def speedups(self) -> dict[str, float]:
        """Seconds of plain decoding over those of the steps, by the number of requests: `1`, `2-3`, `4-7` and so on."""
        found = {(2 ** (bits - 1), 2**bits - 1): sums.in_plain / sums.seconds for bits, sums in self._all.items()}
        return {str(first) if first == last else f"{first}-{last}": each for (first, last), each in found.items()}
