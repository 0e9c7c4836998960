"""Searches that are killed at random moments and resumed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from studies.contract import TrialRecord
from tuner.evaluation.hardening.outcomes import CheckOutcome, prefixed
from tuner.evaluation.hardening.priced_search import SearchPlace
from tuner.evaluation.hardening.resumption import Undisturbed, changed, failure, finish
from tuner.progress import Progress

MOST_IN_A_ROW = 3
"""Kills of one search before it is resumed to its end: on a busy machine it might be killed for ever while it loads."""


def killed_searches(
    num_kills: int, folder: Path, seed: int, progress: Progress
) -> tuple[list[CheckOutcome], dict[str, Any]]:
    """Kill searches `num_kills` times (SIGKILL) at random moments of their time, each up to three times; resume each to its end."""
    return kill_and_resume(SearchPlace.made(folder), num_kills, seed, progress, time.perf_counter)


def kill_and_resume(
    place: SearchPlace, num_kills: int, seed: int, progress: Progress, clock: Callable[[], float]
) -> tuple[list[CheckOutcome], dict[str, Any]]:
    """Return the outcomes of kills and of searches, and figures. `clock` gives seconds.

    Moments of kills are drawn from the seconds that the search before took with all its runs, as the load of the machine changes.
    """
    draw = random.Random(seed)
    kills, ends = CheckOutcome("kills"), CheckOutcome("searches that were killed and resumed")
    progress.stage("searches that are killed", num_kills)
    problem = finish(place, "first")  # makes the stores
    start = clock()
    problem = problem or finish(place, "undisturbed")
    undisturbed_seconds = seconds = clock() - start
    if problem is not None:
        ends.count(f"undisturbed: {problem}")
        return [kills, ends], {}
    undisturbed = Undisturbed.of(place, "undisturbed")
    moments, stored, num_unmet = list[float](), list[int](), 0
    while kills.num_cases < num_kills:
        name, known = f"killed-{ends.num_cases}", dict[tuple[str, int], TrialRecord]()
        problem, start, num_before = None, clock(), len(moments)
        for _ in range(min(draw.randint(1, MOST_IN_A_ROW), num_kills - kills.num_cases)):
            process, moment = place.start(name), draw.uniform(0.0, seconds)
            process.join(moment)
            if process.exitcode is not None:
                problem = failure(place, name, process.exitcode)
                break
            process.kill()
            process.join()
            found = place.records(name)
            kills.count(prefixed(f"{name}, after {moment:.2f} s", changed(known, found)))
            moments.append(round(moment, 3))
            stored.append(len(found))
            known = found
            progress.advance()
        problem = problem or finish(place, name)
        seconds = clock() - start
        num_unmet += len(moments) == num_before
        ends.count(prefixed(name, problem or undisturbed.difference(place, name, known)))
    facts = {
        "seconds_undisturbed": round(undisturbed_seconds, 2),
        "trials": len(undisturbed.records),
        "killed_after_seconds": moments,
        "trials_stored_at_kills": stored,
        "searches_that_ended_before_a_kill": num_unmet,
    }
    return [kills, ends], facts
