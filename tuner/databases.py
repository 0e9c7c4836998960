"""Databases of stores: files looked at before a library opens them, as it would add its tables to any, and tables made at once."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa

from decoding.errors import SdtuneError
from tuner.errors import without_password

TABLES = ("studies", "dbos_migrations")
"""Tables of which a storage of trials has one. The tuning service's database has those of DBOS before it has studies."""
SQLITE = re.compile(r"sqlite(?:\+\w+)?:///([^?]*)")
PRIVATE = 0o600
"""Mode of a database: it holds texts."""
CREATION_SECONDS = 1.0
"""Seconds in which another process that creates the tables of a new database gets to the first of ours."""


def check_address(url: str, *, what: str, error: type[SdtuneError]) -> None:
    """Raise `error` unless `url` is the address of a kind of database that searches and the service were run with."""
    if re.match(r"(sqlite|postgresql)(\+\w+)?:", url) is None:
        raise error(
            f"{what}: {without_password(url)} is no address of a database: give sqlite:///FILE or "
            "postgresql+psycopg://USER@HOST/NAME"
        )


def sqlite_path(url: str) -> Path | None:
    """Return the file of a SQLite address; None for any other, and for a database in memory."""
    found = SQLITE.match(url)
    return None if found is None or found[1] in ("", ":memory:") or found[1].startswith("file:") else Path(found[1])


def make_private(url: str) -> None:
    """Create the SQLite file of `url` if it is missing, for its owner only; SQLite gives its journals the same mode.

    What cannot be created is left to the library that opens the database, which says why.
    """
    path = sqlite_path(url)
    if path is None:
        return
    try:
        made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE)
    except OSError:
        return
    try:
        os.fchmod(made, PRIVATE)  # whatever the umask
    finally:
        os.close(made)


def refuse_unusable_database(url: str, *, what: str, tables: Collection[str], error: type[SdtuneError]) -> None:
    """Raise `error` unless the SQLite file of `url` is absent or empty, or holds one of `tables` and can be written.

    `what` names it in the message. Does nothing for other databases. A library would retry for minutes to open a folder or a file
    that cannot be written.
    """
    path = sqlite_path(url)
    if path is None:
        return
    if path.is_dir():
        raise error(f"cannot use {what} {path}: it is a folder; name a file in it")
    if not path.exists():
        if not os.access(path.parent, os.W_OK | os.X_OK):
            missing = "cannot be written" if path.parent.is_dir() else "is not there"
            raise error(f"cannot use {what} {path}: the folder {path.parent} {missing}")
        return
    if not os.access(path, os.R_OK | os.W_OK):
        raise error(f"cannot use {what} {path}: the file cannot be written")
    found = _tables(path, what, error)
    if found and found.isdisjoint(tables):
        time.sleep(CREATION_SECONDS)
        found = _tables(path, what, error)
    if found and found.isdisjoint(tables):
        raise error(f"cannot use {what} {path}: it belongs to another application (tables: {_shown(found)})")


def _tables(path: Path, what: str, error: type[SdtuneError]) -> set[str]:
    """Return the names of the tables; none if the database is locked by a process that uses it, as opening it waits."""
    # Not read-only: what a killed process left half written is undone by the next that reads it, for which SQLite has to write.
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=rw", uri=True)) as database:
            return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.OperationalError as cause:
        if "locked" in str(cause):
            return set()
        raise error(f"cannot use {what} {path}: {cause}") from None
    except sqlite3.DatabaseError as cause:
        raise error(f"cannot use {what} {path}: {cause}") from None


def _shown(tables: set[str]) -> str:
    first = sorted(tables)[:3]
    return ", ".join(first) + (" ..." if len(tables) > len(first) else "")


def attempt(create: Callable[[], object], attempts: int = 5) -> None:
    """Call `create`, again if another process made the same table between its look and its creation."""
    for left in reversed(range(attempts)):
        try:
            create()
            return
        except (sa.exc.OperationalError, sa.exc.ProgrammingError, sa.exc.IntegrityError) as cause:
            if not left or not ("exists" in str(cause) or isinstance(cause, sa.exc.IntegrityError)):
                raise
            time.sleep(0.1)
