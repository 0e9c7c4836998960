"""Searches that are killed at random moments and resumed: nothing finished is lost or doubled, and the winner is the same."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from studies.contract import TrialRecord
from tuner.evaluation.hardening.outcomes import CheckOutcome
from tuner.evaluation.hardening.priced_search import SearchPlace
from tuner.progress import Progress

Records = Mapping[tuple[str, int], TrialRecord]
LIMIT_SECONDS = 900
"""After this a run counts as hanging, also on a busy machine."""


def killed_searches(
    num_kills: int, folder: Path, seed: int, progress: Progress
) -> tuple[list[CheckOutcome], dict[str, Any]]:
    """Kill searches `num_kills` times (SIGKILL) at moments drawn from the time of an undisturbed one; resume each to its end."""
    place, draw = SearchPlace.made(folder), random.Random(seed)
    progress.stage("searches that are killed", num_kills)
    _finish(place, "first")  # makes the stores
    start = time.perf_counter()
    _finish(place, "undisturbed")
    seconds = time.perf_counter() - start
    wanted, records = place.winner("undisturbed"), place.records("undisturbed")
    kills, ends = CheckOutcome("kills"), CheckOutcome("searches that were killed and resumed")
    moments = list[float]()
    while kills.num_cases < num_kills:
        name, known = f"killed-{ends.num_cases}", dict[tuple[str, int], TrialRecord]()
        while kills.num_cases < num_kills:
            process, moment = place.start(name), draw.uniform(0.0, seconds)
            process.join(moment)
            if process.exitcode is not None:
                break
            process.kill()
            process.join()
            found = place.records(name)
            kills.count(_prefixed(f"{name}, after {moment:.2f} s", changed(known, found)))
            moments.append(round(moment, 3))
            known = found
            progress.advance()
        ended = _finish(place, name)
        ends.count(_prefixed(name, ended or _differences(place, name, known, records, wanted)))
    facts = {"seconds_undisturbed": round(seconds, 2), "trials": len(records), "killed_after_seconds": moments}
    return [kills, ends], facts


def changed(before: Records, after: Records) -> str | None:
    """Return which finished trials of `before` are missing or different in `after`, or None."""
    for key, record in before.items():
        if key not in after:
            return f"the finished trial {key} is lost"
        if after[key] != record:
            return f"the finished trial {key} has changed"
    return None


def unlike(records: Records, undisturbed: Records) -> str | None:
    """Return how the trials of a search differ from an undisturbed search's, or None: numbers and repeats."""
    for study in {study for study, _ in undisturbed}:
        counts = [sum(each == study for each, _ in found) for found in (records, undisturbed)]
        if counts[0] != counts[1]:
            return f"{counts[0]} finished trials of {study}, and {counts[1]} undisturbed"
    return None


def _finish(place: SearchPlace, name: str) -> str | None:
    """Run the search to its end; return what went wrong."""
    process = place.start(name)
    process.join(LIMIT_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        return f"no end after {LIMIT_SECONDS} s"
    return None if process.exitcode == 0 else f"status {process.exitcode}: {place.said(name)[-300:]}"


def _differences(place: SearchPlace, name: str, known: Records, undisturbed: Records, wanted: Any) -> str | None:
    records = place.records(name)
    if (problem := changed(known, records) or unlike(records, undisturbed)) is not None:
        return problem
    parents, nested = place.runs(name)
    if parents != ["FINISHED"]:
        return f"parent runs in MLflow: {parents}"
    if doubled := [key for key, statuses in nested.items() if len(statuses) > 1]:
        return f"trials with more than one run in MLflow: {doubled}"
    if set(nested) != set(records):
        return f"MLflow has the trials {sorted(nested)}, the storage {sorted(records)}"
    if open_runs := [key for key, (status,) in nested.items() if status == "RUNNING"]:
        return f"runs in MLflow that never ended: {open_runs}"
    return None if place.winner(name) == wanted else f"another winner: {place.winner(name)}, undisturbed {wanted}"


def _prefixed(what: str, problem: str | None) -> str | None:
    return None if problem is None else f"{what}: {problem}"
