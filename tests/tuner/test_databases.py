"""SQLite files, looked at before a library opens them, and made for their owner only."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tuner.databases import TABLES, make_private, refuse_unusable_database, sqlite_path
from tuner.errors import StorageError
from tuner.search.storage import StudyStore
from tuner.service.jobs import Jobs
from tuner.tracking import opened_store


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
        database.execute("CREATE TABLE dbos_migrations (version INTEGER)")
    refuse_unusable_database(f"sqlite:///{path}", what="the storage", tables=TABLES, error=StorageError)


@pytest.fixture(params=[0, 0o277], ids=["all", "none"])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir() if path.is_file()}


def test_a_database_and_its_journals_are_the_owners(tmp_path: Path, umask: None) -> None:
    make_private(f"sqlite:///{tmp_path}/a.db")
    with closing(sqlite3.connect(tmp_path / "a.db")) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE t (x)")
        assert modes(tmp_path) == {"a.db": 0o600, "a.db-wal": 0o600, "a.db-shm": 0o600}


@pytest.mark.parametrize("store", ["service", "trials", "mlflow"])
def test_stores_make_their_files_private(tmp_path: Path, store: str) -> None:
    url = f"sqlite:///{tmp_path}/{store}.db"
    before = os.umask(0)
    try:
        if store == "service":
            Jobs(url).close()
        elif store == "trials":
            StudyStore(url, "experiment").close()
        else:
            with opened_store(url) as mlflow:
                mlflow.MlflowClient(tracking_uri=url).search_experiments(max_results=1)
    finally:
        os.umask(before)
    assert set(modes(tmp_path).values()) == {0o600}


def test_a_file_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "a.db").touch(0o640)
    (tmp_path / "a.db").chmod(0o640)
    make_private(f"sqlite:///{tmp_path}/a.db")
    make_private(f"sqlite:///{tmp_path}/absent/a.db")
    assert modes(tmp_path) == {"a.db": 0o640}


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///a.db", "a.db"),
        ("sqlite+pysqlite:////tmp/a.db?timeout=3", "/tmp/a.db"),
        ("sqlite://", None),
        ("sqlite:///:memory:", None),
        ("sqlite:///file:a.db?uri=true", None),
        ("postgresql://a/b", None),
    ],
)
def test_the_file_of_an_address(url: str, path: str | None) -> None:
    assert sqlite_path(url) == (None if path is None else Path(path))
