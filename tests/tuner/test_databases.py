"""SQLite files, looked at before a library opens them."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tuner.databases import refuse_unusable_database
from tuner.errors import StorageError
from tuner.leases.table import LEASES_TABLE
from tuner.search.storage import TABLES


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A database as a process leaves it that is killed while it writes: with the journal of its transaction."""
    path, left = tmp_path / "open.db", tmp_path / "left.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("CREATE TABLE studies (content BLOB)")
        database.execute("INSERT INTO studies VALUES ('finished')")
        database.execute("PRAGMA cache_size = 2")  # pages, so that the file changes before the transaction ends
        database.execute("BEGIN")
        database.executemany("INSERT INTO studies VALUES (?)", [(bytes(10_000),)] * 20)
        shutil.copy(path, left)
        shutil.copy(f"{path}-journal", f"{left}-journal")
    return left


def test_a_database_whose_writer_was_killed_is_used_again(killed: Path) -> None:
    refuse_unusable_database(f"sqlite:///{killed}", what="the storage", tables=("studies",), error=StorageError)
    with closing(sqlite3.connect(killed)) as database:
        assert database.execute("SELECT content FROM studies").fetchall() == [("finished",)]


def test_the_database_of_the_service_holds_its_trials(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"CREATE TABLE {LEASES_TABLE} (name TEXT)")
    refuse_unusable_database(f"sqlite:///{path}", what="the storage", tables=TABLES, error=StorageError)
