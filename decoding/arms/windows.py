"""Windows: consecutive rounds of one arm, timed together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from decoding.arms.belief import PLAIN
from decoding.rounds import Round

FEWEST_TOKENS = 8
"""Tokens per sequence before which no window ends: so that a window of long rounds is no longer than one of short ones."""
FEWEST_ROUNDS = 4
"""Rounds per sequence before which no window ends."""
FEWEST_ROUNDS_OF_TRIAL = 2
"""Rounds per sequence before which no trial of a draft ends."""
FEWEST_ROUNDS_IN_ALL = 8
"""Rounds of all sequences together before which no window ends: the speed of a few is mostly chance."""


@dataclass(frozen=True)
class TimedWindow:
    """What one arm did in consecutive rounds of the sequences side by side. Seconds of reading prompts are left out."""

    arm: int
    num_running: float
    """Sequences side by side, on average over the seconds."""
    num_rounds: int
    num_tokens: int
    seconds: float
    num_drafted: int
    accepted_lengths: tuple[int, ...]
    """Number of rounds that accepted 0, 1, 2 ... drafted tokens."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, of all sequences together."""
        return self.num_tokens / self.seconds


@dataclass
class OpenWindow:
    """A window that is being filled.

    The first round of each sequence is left out if it `may_begin_before` the window, with another arm. A trial ends early: it may
    cost much, and the next window goes on if it went well.
    """

    arm: int
    may_begin_before: bool = True
    is_trial: bool = False
    rounds: list[Round] = field(default_factory=list)
    seconds: float = 0.0
    sequence_seconds: float = 0.0
    rounds_per_sequence: float = 0.0
    tokens_per_sequence: float = 0.0
    num_left_out: int = 0
    fewest_running: int = 2**31
    most_running: int = 0

    @classmethod
    def after(cls, arm: int, before: int) -> OpenWindow:
        """Return the window of an arm after one of the arm `before`.

        All sequences end plain rounds at once, so no round before a window of drafts reaches into it then.
        """
        return cls(arm, may_begin_before=before not in (arm, PLAIN), is_trial=before == PLAIN != arm)

    @property
    def is_empty(self) -> bool:
        """Return True if nothing was added yet."""
        return not self.most_running

    def fits(self, num_running: int) -> bool:
        """Return True unless the number of sequences has more than doubled or halved since the window began."""
        return num_running <= 2 * self.fewest_running and self.most_running <= 2 * num_running

    def add(self, num_running: int, rounds: Sequence[Round], seconds: float) -> TimedWindow | None:
        """Add `seconds` of decoding `num_running` sequences, in which rounds ended; return the window if it is full."""
        self.fewest_running = min(self.fewest_running, num_running)
        self.most_running = max(self.most_running, num_running)
        if self.may_begin_before and self.num_left_out < num_running:
            self.num_left_out += len(rounds)
            return None
        self.rounds += rounds
        self.seconds += seconds
        self.sequence_seconds += seconds * num_running
        self.rounds_per_sequence += len(rounds) / num_running
        self.tokens_per_sequence += sum(len(each.tokens) for each in rounds) / num_running
        return self._closed() if self._is_full and self.seconds > 0 else None

    @property
    def _is_full(self) -> bool:
        if len(self.rounds) < FEWEST_ROUNDS_IN_ALL:
            return False
        if self.is_trial:
            return self.rounds_per_sequence >= FEWEST_ROUNDS_OF_TRIAL
        return self.tokens_per_sequence >= FEWEST_TOKENS and self.rounds_per_sequence >= FEWEST_ROUNDS

    def _closed(self) -> TimedWindow:
        lengths = Counter(each.num_accepted for each in self.rounds)
        return TimedWindow(
            arm=self.arm,
            num_running=self.sequence_seconds / self.seconds,
            num_rounds=len(self.rounds),
            num_tokens=sum(len(each.tokens) for each in self.rounds),
            seconds=self.seconds,
            num_drafted=sum(each.num_drafted for each in self.rounds),
            accepted_lengths=tuple(lengths[length] for length in range(max(lengths) + 1)),
        )
