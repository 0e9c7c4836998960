"""Searches that are killed at random moments and resumed."""

from __future__ import annotations

import random
import time
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
    place, draw = SearchPlace.made(folder), random.Random(seed)
    kills, ends = CheckOutcome("kills"), CheckOutcome("searches that were killed and resumed")
    progress.stage("searches that are killed", num_kills)
    problem = finish(place, "first")  # makes the stores
    start = time.perf_counter()
    problem = problem or finish(place, "undisturbed")
    undisturbed_seconds = seconds = time.perf_counter() - start
    if problem is not None:
        ends.count(f"undisturbed: {problem}")
        return [kills, ends], {}
    undisturbed = Undisturbed.of(place, "undisturbed")
    moments, stored = list[float](), list[int]()
    while kills.num_cases < num_kills:
        name, known = f"killed-{ends.num_cases}", dict[tuple[str, int], TrialRecord]()
        problem = None
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
        start = time.perf_counter()
        problem = problem or finish(place, name)
        # The machine may be busier than it was: a whole search takes at least what a resumed one does.
        seconds = max(undisturbed_seconds, time.perf_counter() - start)
        ends.count(prefixed(name, problem or undisturbed.difference(place, name, known)))
    facts = {
        "seconds_undisturbed": round(undisturbed_seconds, 2),
        "trials": len(undisturbed.records),
        "killed_after_seconds": moments,
        "trials_stored_at_kills": stored,
    }
    return [kills, ends], facts
