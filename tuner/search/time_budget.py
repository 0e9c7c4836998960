"""The time of a search: its limit, what is spent of it, and what must remain for race and confirmation.

`--timeout` covers everything from the start of the command to the profile, resumed runs included. The time of distilling
exit heads is on top of it only where it was given a limit of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from studies.contract import TrialRecord
from tuner.errors import SearchError
from tuner.search.budget import Budget
from tuner.stage_clock import StageClock, spoken

LAST_TRIALS = 3
"""Trials whose longest is expected of the next one."""
GRACE = 0.5
"""Share of an expected trial by which a running one may overrun, before it is cut between two prompts."""
SPENT = "its share of the search time is spent"


class TimeBudget:
    """Seconds left of a search, read from its clock; unlimited without a timeout."""

    def __init__(self, timeout: float | None, clock: StageClock, *, spent_before: float = 0.0) -> None:
        """`spent_before` is the time of earlier runs of the same search."""
        self.timeout = timeout
        self.clock = clock
        self.spent_before = spent_before
        self.on_top = 0.0
        """Seconds of this run that do not count, as the plan named them as coming on top."""

    @property
    def spent(self) -> float:
        """Seconds of this run and earlier ones that count."""
        return self.spent_before + self.clock.elapsed - self.on_top

    @property
    def left(self) -> float:
        """Seconds left; infinite without a timeout, negative after an overrun."""
        return math.inf if self.timeout is None else self.timeout - self.spent

    def check(self, needed: float, what: str) -> None:
        """Raise `SearchError` with the way to go on if less than `needed` seconds are left for `what`."""
        if self.timeout is None or self.left >= needed:
            return
        more = enough(self.spent + needed)
        if self.spent_before:
            raise SearchError(
                f"{spoken(self.spent_before)} of --timeout {spoken(self.timeout)} were spent by earlier runs, and {what} takes "
                f"about {spoken(needed)}: --timeout {more} goes on from the trials that are stored"
            )
        raise SearchError(
            f"--timeout {spoken(self.timeout)} is too short for this model: {spoken(self.spent)} are spent, and {what} takes "
            f"about {spoken(needed)} more: give --timeout {more} or more, or lower --max-new-tokens or the numbers of prompts"
        )


def enough(seconds: float) -> str:
    """Return a round duration of at least `seconds`, as `--timeout` takes it, with a margin of a tenth."""
    wanted = 1.1 * seconds
    return f"{math.ceil(wanted / 10) * 10}s" if wanted < 120 else f"{math.ceil(wanted / 60)}m"


class Pace:
    """Lets equal steps go on while the next one fits, if it takes as long as the longest so far.

    `seconds_left` gives the seconds left for these steps. The first step always begins.
    """

    def __init__(self, seconds_left: Callable[[], float]) -> None:
        self._seconds_left = seconds_left
        self._before: float | None = None
        self._longest = 0.0

    def __call__(self) -> bool:
        """Return True if another step may begin; to be called before each step."""
        now = self._seconds_left()
        if math.isinf(now):
            return True
        if self._before is None:
            self._before = now
            return True
        self._longest = max(self._longest, self._before - now)
        self._before = now
        return now >= self._longest


@dataclass(frozen=True)
class Reserve:
    """Seconds that the end of a search needs: race, confirmation and results."""

    whole: float
    """As planned."""
    least: float
    """With the fewest finalists and prompts."""
    trial: float
    """Expected seconds of a trial."""


@dataclass
class TimedBudget(Budget):
    """Budget of a study that begins a trial only if the trial is likely to end in time.

    While it has no result, a trial may use the time that race and confirmation can do without.
    """

    left: Callable[[], float] = field(kw_only=True)
    """Seconds left for trials of this study."""
    least_left: Callable[[], float] = field(kw_only=True)
    """Seconds left if race and confirmation are cut to the least."""
    has_result: Callable[[], bool] = field(kw_only=True)
    """Tells if any trial that counts is complete: of the search, or of this study if it is the last one."""
    trial_seconds: float = field(kw_only=True)
    """Expected seconds of a trial, until trials have shown it."""
    _taken: list[float] = field(default_factory=list, init=False)

    def spend(self, record: TrialRecord) -> None:
        """Count a trial's seconds, and expect the next to take as long, unless it only repeated an earlier one."""
        super().spend(record)
        if record.repeat_of is None:
            self._taken.append(record.seconds)

    def exhausted(self, num_trials: int) -> str | None:
        """Return the reason that no further trial may begin, or None."""
        if (reason := super().exhausted(num_trials)) is not None:
            return reason
        left = self.left() if self.has_result() else max(self.left(), self.least_left())
        return None if left >= self._expected else SPENT

    def overdue(self) -> str | None:
        """Return the reason to cut the running trial, or None."""
        left = self.left() if self.has_result() else max(self.left(), self.least_left())
        return None if left > -GRACE * self._expected else "cut, as the search time is spent"

    @property
    def _expected(self) -> float:
        return max(self._taken[-LAST_TRIALS:], default=self.trial_seconds)
