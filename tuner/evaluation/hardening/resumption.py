"""Searches run to their end and compared with an undisturbed one: what was finished, MLflow's runs, and the winner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from studies.contract import TrialRecord
from tuner.evaluation.hardening.priced_search import SearchPlace

Records = Mapping[tuple[str, int], TrialRecord]
LIMIT_SECONDS = 900
"""After this a run counts as hanging, also on a busy machine."""


@dataclass(frozen=True)
class Undisturbed:
    """What a search without any disturbance ends with."""

    records: Records
    winner: Any

    @classmethod
    def of(cls, place: SearchPlace, name: str) -> Undisturbed:
        """Return what the finished search `name` has on disk."""
        return cls(place.records(name), place.winner(name))

    def difference(self, place: SearchPlace, name: str, known: Records) -> str | None:
        """Return how a resumed search differs from this one, or None; `known` are its trials that were finished before."""
        records = place.records(name)
        if (problem := changed(known, records) or unlike(records, self.records)) is not None:
            return problem
        if (problem := untrue(place.runs(name), records)) is not None:
            return problem
        winner = place.winner(name)
        return None if winner == self.winner else f"another winner: {winner}, undisturbed {self.winner}"


def changed(before: Records, after: Records) -> str | None:
    """Return which finished trials of `before` are missing or different in `after`, or None."""
    for key, record in before.items():
        if key not in after:
            return f"the finished trial {key} is lost"
        if after[key] != record:
            return f"the finished trial {key} has changed"
    return None


def unlike(records: Records, undisturbed: Records) -> str | None:
    """Return in which study the number of finished trials differs from an undisturbed search's, or None."""
    for study in {study for study, _ in undisturbed}:
        counts = [sum(each == study for each, _ in found) for found in (records, undisturbed)]
        if counts[0] != counts[1]:
            return f"{counts[0]} finished trials of {study}, and {counts[1]} undisturbed"
    return None


def untrue(runs: tuple[Sequence[str], Mapping[tuple[str, int], Sequence[str]]], records: Records) -> str | None:
    """Return what MLflow's runs of a finished search, as `tracked_runs` gives them, say wrongly of its trials, or None."""
    parents, nested = runs
    if list(parents) != ["FINISHED"]:
        return f"parent runs in MLflow: {parents}"
    if doubled := [key for key, statuses in nested.items() if len(statuses) > 1]:
        return f"trials with more than one run in MLflow: {doubled}"
    if set(nested) != set(records):
        return f"MLflow has the trials {sorted(nested)}, the storage {sorted(records)}"
    if open_runs := [key for key, (status,) in nested.items() if status == "RUNNING"]:
        return f"runs in MLflow that never ended: {open_runs}"
    return None


def finish(place: SearchPlace, name: str) -> str | None:
    """Run the search to its end; return what went wrong."""
    return failure(place, name, status(place.start(name)))


def status(process: BaseProcess) -> int | None:
    """Return the exit status of a search once it has ended; None if it had to be killed, as it hung."""
    process.join(LIMIT_SECONDS)
    if process.exitcode is not None:
        return process.exitcode
    process.kill()
    process.join()
    return None


def failure(place: SearchPlace, name: str, ended: int | None) -> str | None:
    """Return how a search failed that ended with the status `ended`, or None."""
    if ended is None:
        return f"no end after {LIMIT_SECONDS} s"
    return None if ended == 0 else f"status {ended}: {place.said(name)[-300:]}"
