"""A search whose stores fail: a full disk, a folder that cannot be written, a database that another process locks.

Each begins with a search of one finished trial a study. What was finished must be there afterwards, whatever happened, the message
must be one line, and the same search must end once the fault is gone.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tuner.evaluation.hardening.kills import LIMIT_SECONDS, changed
from tuner.evaluation.hardening.outcomes import CheckOutcome
from tuner.evaluation.hardening.priced_search import REFUSED, STUDIES, SearchPlace
from tuner.progress import Progress

NOBODY = 65534
"""User without rights, in place of root, whom no permission stops."""
LOCKED_SECONDS = 30.0
SPARE_BYTES = 16_384
"""Bytes by which the largest database may still grow when the disk is full: less than a trial takes."""
FILLER_BYTES = 4_000_000
"""Size to which one database is brought, so that it is the one that meets the limit of a file's size."""
FEW = {study: {**settings, "max_trials": 1} for study, settings in STUDIES.items()}


def faulty_stores(folder: Path, locked_seconds: float, progress: Progress) -> tuple[CheckOutcome, dict[str, Any]]:
    """Run a search under each fault; return what went wrong, and what each search said."""
    outcome, said = CheckOutcome("stores that fail"), dict[str, Any]()
    cases: dict[str, Callable[[SearchPlace, str], str | None]] = {
        "full disk, trials": lambda place, name: _full(place, name, place.storage),
        "full disk, MLflow": lambda place, name: _full(place, name, place.tracking),
        "read-only folder": _read_only,
        "locked trials": lambda place, name: _locked(place, name, place.storage, locked_seconds),
        "locked MLflow": lambda place, name: _locked(place, name, place.tracking, locked_seconds),
    }
    progress.stage("stores that fail", len(cases))
    for number, (case, check) in enumerate(cases.items()):
        own = folder / str(number)
        own.mkdir()
        place, name = SearchPlace.made(own), "faulty"
        problem = _run(place, name, studies=FEW)
        before = place.records(name)
        problem = problem or (None if before else "no trial was finished before the fault")
        problem = problem or check(place, name)
        said[case] = place.said(name).strip()
        problem = problem or changed(before, place.records(name))
        problem = problem or _run(place, name) or changed(before, place.records(name))
        outcome.count(None if problem is None else f"{case}: {problem}")
        progress.advance()
    return outcome, said


def _run(place: SearchPlace, name: str, **changes: Any) -> str | None:
    """Run a search to its end; return what went wrong."""
    status = _status(place, name, **changes)
    return None if status == 0 else f"status {status}: {place.said(name)[-300:]}"


def _status(place: SearchPlace, name: str, **changes: Any) -> int | None:
    process = place.start(name, **changes)
    process.join(LIMIT_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode


def _refused(place: SearchPlace, name: str, **changes: Any) -> str | None:
    """Run a search that must end with one line; return what went wrong."""
    status, lines = _status(place, name, **changes), place.said(name).splitlines()
    if status != REFUSED:
        return f"status {status}: {place.said(name)[-300:]}"
    return None if len(lines) == 1 and lines[0].startswith("sdtune: ") else f"not one line: {lines[-5:]}"


def _full(place: SearchPlace, name: str, database: Path) -> str | None:
    """Let `database` be the largest file, and no file grow further."""
    with closing(sqlite3.connect(database)) as opened, opened:
        opened.execute("CREATE TABLE filler (content BLOB)")
        opened.execute("INSERT INTO filler VALUES (zeroblob(?))", (FILLER_BYTES,))
    return _refused(place, name, most_bytes=database.stat().st_size + SPARE_BYTES)


def _read_only(place: SearchPlace, name: str) -> str | None:
    """Take the right to write away from the folder of all stores."""
    user = NOBODY if os.getuid() == 0 else None
    modes = {path: path.stat().st_mode for path in [place.folder, *place.folder.rglob("*")]}
    for path, mode in modes.items():
        path.chmod(mode & ~0o222 | 0o444 | (0o111 if path.is_dir() else 0))
    place.said_file(name).chmod(0o666)
    try:
        return _refused(place, name, user=user)
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


def _locked(place: SearchPlace, name: str, database: Path, seconds: float) -> str | None:
    """Lock `database` for `seconds` while the search runs; it waits, and ends as if nothing had been."""
    process = place.start(name)
    with _lock(database):
        time.sleep(seconds)
    process.join(LIMIT_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
    return None if process.exitcode == 0 else f"status {process.exitcode}: {place.said(name)[-300:]}"


@contextmanager
def _lock(database: Path) -> Iterator[None]:
    """Lock a SQLite file for readers and writers."""
    with closing(sqlite3.connect(database, timeout=LIMIT_SECONDS, isolation_level=None)) as opened:
        opened.execute("BEGIN EXCLUSIVE")
        try:
            yield
        finally:
            opened.execute("ROLLBACK")
