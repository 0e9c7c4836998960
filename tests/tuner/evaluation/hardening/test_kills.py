"""When searches are killed. The searches are stand-ins that take seconds of a scripted clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import pytest

from tuner.evaluation.hardening.kills import kill_and_resume
from tuner.evaluation.hardening.priced_search import SearchPlace
from tuner.progress import Unwatched


class Clock:
    """Seconds since the start of the test."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Searches:
    """Searches of given seconds, the first ones in turn and the last one again and again; a killed one goes on where it was."""

    def __init__(self, clock: Clock, seconds: Sequence[float]) -> None:
        self._clock, self._seconds = clock, list(seconds)
        self._left: defaultdict[str, float] = defaultdict(self._next)
        self.exitcode: int | None = None

    def _next(self) -> float:
        return self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]

    def start(self, name: str) -> Searches:
        self._name, self.exitcode = name, None
        return self

    def join(self, timeout: float = 1e6) -> None:
        spent = min(timeout, self._left[self._name])
        self._clock.now += spent
        self._left[self._name] -= spent
        self.exitcode = None if self._left[self._name] else 0

    def kill(self) -> None:
        assert self.exitcode is None

    def records(self, name: str) -> dict[Any, Any]:
        return {}

    def winner(self, name: str) -> str:
        return "draft"

    def runs(self, name: str) -> tuple[list[str], dict[Any, Any]]:
        return ["FINISHED"], {}


@pytest.mark.parametrize(("undisturbed", "later"), [(100.0, 10.0), (10.0, 100.0)])
def test_kills_follow_searches_that_become_faster_or_slower(undisturbed: float, later: float) -> None:
    clock = Clock()
    searches = Searches(clock, [undisturbed, undisturbed, later])
    (kills, ends), facts = kill_and_resume(cast(SearchPlace, searches), 30, 0, Unwatched(), clock)
    assert kills.num_cases == 30
    assert kills.failures == ends.failures == []
    assert max(facts["killed_after_seconds"]) > 0.9 * later
    # Moments drawn from 100 s would nearly all lie behind the end of a search of 10 s.
    assert facts["searches_that_ended_before_a_kill"] < ends.num_cases / 4
