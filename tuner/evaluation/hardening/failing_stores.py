"""A search whose stores fail after its second trial: a full disk, a folder that cannot be written, a database locked by another.

Trials, MLflow's runs and the profile lie in a folder each, and one of them fails. The search must end with one line, or wait and
end as if nothing had been. All that was finished is on disk, and the same search ends as an undisturbed one once the fault is gone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tuner.evaluation.hardening import faults
from tuner.evaluation.hardening.outcomes import CheckOutcome, prefixed
from tuner.evaluation.hardening.priced_search import REFUSED, STORES, SearchPlace
from tuner.evaluation.hardening.resumption import Undisturbed, failure, finish, status
from tuner.progress import Progress

STRIKES_AFTER = 2
"""Trials that are finished before the fault."""
DISK_BYTES = 8 * 2**20
"""Size of a disk that is filled: room for a store, and little to fill."""
NAME = "faulty"
NEEDS_ROOT = "only root can mount a small disk"


@dataclass(frozen=True)
class Case:
    """A fault of one of the three folders in which a search writes."""

    name: str
    store: str
    """The folder that fails, by its key in `SearchPlace.stores`."""
    strike: Callable[[SearchPlace, str], faults.Fault]
    """Returns the fault of that folder, which begins in the process of the search."""
    repair: Callable[[Path], object] = lambda folder: None
    disk: Callable[[Path], AbstractContextManager[object]] = nullcontext
    """What the folder lies on."""
    waits: bool = False
    """Whether the search is to wait for the end of the fault."""


def cases(locked_seconds: float) -> list[Case]:
    """Return all cases; full disks only for root, who can mount a small one."""

    def fill(place: SearchPlace, store: str) -> faults.Fault:
        return partial(faults.fill, place.stores[store])

    def forbid(place: SearchPlace, store: str) -> faults.Fault:
        return partial(faults.forbid_writing, place.stores[store])

    def lock(place: SearchPlace, store: str) -> faults.Fault:
        return partial(faults.lock, place.database(store), locked_seconds)

    full = [Case(f"full disk, {each}", each, fill, faults.make_room, _small_disk) for each in STORES]
    closed = [Case(f"read-only folder, {each}", each, forbid, faults.allow_writing) for each in STORES]
    locked = [Case(f"database locked for {locked_seconds:g} s, {each}", each, lock, waits=True) for each in STORES[:2]]
    return [*(full if os.geteuid() == 0 else []), *closed, *locked]


def searches_with_failing_stores(
    most: int, locked_seconds: float, folder: Path, progress: Progress
) -> tuple[CheckOutcome, dict[str, Any]]:
    """Run a search under each of at most `most` faults; return what went wrong, and what each search said."""
    outcome, said = CheckOutcome("searches with failing stores"), dict[str, Any]()
    wanted = cases(locked_seconds)[:most]
    progress.stage("searches with failing stores", len(wanted))
    model = SearchPlace.made(folder)
    if (problem := finish(model, "undisturbed")) is not None:
        outcome.count(f"undisturbed: {problem}")
        return outcome, said
    undisturbed = Undisturbed.of(model, "undisturbed")
    for case in wanted:
        own = folder / case.name.replace(" ", "-").replace(",", "")
        with ExitStack() as stack:
            stores = {store: own / store for store in STORES}
            for store, path in stores.items():
                path.mkdir(parents=True)
                if store == case.store:
                    stack.enter_context(case.disk(path))
            shutil.copy(model.database("tracking"), stores["tracking"])  # making its tables takes seconds
            place = SearchPlace(folder, stores)
            outcome.count(prefixed(case.name, _problem(case, place, undisturbed, said)))
        progress.advance()
    if os.geteuid() != 0:
        said["full disks"] = f"left out: {NEEDS_ROOT}"
    return outcome, said


def _problem(case: Case, place: SearchPlace, undisturbed: Undisturbed, said: dict[str, Any]) -> str | None:
    """Run the search, repair what failed and run it again; return what went wrong."""
    ended = status(place.start(NAME, after=STRIKES_AFTER, fault=case.strike(place, case.store)))
    said[case.name] = place.said(NAME).strip()
    case.repair(place.stores[case.store])
    problem = failure(place, NAME, ended) if case.waits else _unlike_a_refusal(place, ended)
    known = place.records(NAME)
    if problem is None and len(known) < STRIKES_AFTER:
        problem = f"{len(known)} trials are on disk, of {STRIKES_AFTER} before the fault"
    return problem or finish(place, NAME) or undisturbed.difference(place, NAME, known)


def _unlike_a_refusal(place: SearchPlace, ended: int | None) -> str | None:
    """Return how the end of a search differs from status 2 with one line, or None."""
    if ended != REFUSED:
        return failure(place, NAME, ended) or "it ended well, with a store that failed"
    lines = [line for line in place.said(NAME).splitlines() if line.strip()]
    return None if len(lines) == 1 and lines[0].startswith("sdtune: ") else f"not one line: {lines[-5:]}"


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """Let `folder` be a disk of its own, of a few megabytes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
