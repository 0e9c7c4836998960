"""The table of workers, on SQLite and PostgreSQL."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from tuner.service.contract import WorkerCard
from tuner.service.workers import Process, Workers

ELSEWHERE = replace(Process.current(), host="another", place="elsewhere")


BOTH = pytest.mark.parametrize("engine", ["sqlite", "postgresql"], indirect=True)
"""For what databases do each in their own way: clocks and locks."""


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    is_file = getattr(request, "param", "sqlite") == "sqlite"
    url = f"sqlite:///{tmp_path / 'workers.db'}" if is_file else request.getfixturevalue("postgres_url")
    engine = sa.create_engine(url)
    yield engine
    engine.dispose()


def added(engine: sa.Engine, process: Process | None = None) -> Workers:
    workers = Workers(engine)
    workers.add("a", "cpu", "default", process)
    return workers


def card(workers: Workers) -> WorkerCard:
    (found,) = workers.cards()
    return found


def step(engine: sa.Engine, seconds: float) -> None:
    """What a clock that steps forward does to signs of life."""
    with engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE sdtune_workers SET beat = beat - {seconds}"))


@BOTH
def test_a_worker_is_in_the_table_until_it_leaves(engine: sa.Engine) -> None:
    workers = added(engine)
    workers.tell("a", "job")
    found = card(Workers(engine))
    assert (found.name, found.host, found.device, found.queue) == ("a", Process.current().host, "cpu", "default")
    assert (found.job, found.alive) == ("job", True)
    workers.tell("a", None)
    assert card(workers).job is None
    assert workers.beat("a")
    workers.remove("a")
    assert workers.cards() == []
    assert not workers.beat("a"), "who was taken for dead does not come back"
    assert workers.cards() == []


def test_an_ended_process_of_this_machine_is_dead_at_once(engine: sa.Engine) -> None:
    done = subprocess.Popen(["true"])
    done.wait()
    assert not card(added(engine, replace(Process.current(), pid=done.pid))).alive


@BOTH
def test_a_silent_process_of_another_machine_is_dead_after_the_grace_period(engine: sa.Engine) -> None:
    workers = added(engine, ELSEWHERE)
    assert card(workers).alive
    step(engine, 86400)
    assert not card(workers).alive
    assert card(workers).silent_seconds >= 86400
    assert workers.beat("a")
    assert card(workers).alive


def test_a_living_process_of_this_machine_is_not_dead_whatever_a_clock_says(engine: sa.Engine) -> None:
    workers = added(engine)
    step(engine, 86400)
    assert card(workers).alive
    step(engine, -2 * 86400)
    assert card(workers).alive
    assert card(workers).silent_seconds == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_later_process_of_the_same_number_is_another(engine: sa.Engine) -> None:
    me = Process.current()
    assert me.started is not None
    assert not card(added(engine, replace(me, started=me.started - 1))).alive


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_ended_and_was_not_waited_for_is_dead(engine: sa.Engine) -> None:
    """`kill -9` leaves one behind until its parent asks for it."""
    with subprocess.Popen(["sleep", "600"]) as child:
        started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        workers = added(engine, replace(Process.current(), pid=child.pid, started=started))
        try:
            assert card(workers).alive
        finally:
            child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not card(workers).alive


@BOTH
def test_one_at_a_time_is_alone(engine: sa.Engine) -> None:
    first, second = Workers(engine), Workers(engine)
    with first.alone() as is_alone, second.alone() as is_alone_too:
        assert (is_alone, is_alone_too) == (True, False)
    with pytest.raises(ZeroDivisionError), first.alone():
        _ = 1 / 0
    with second.alone() as is_alone:
        assert is_alone


@BOTH
def test_who_is_killed_alone_hinders_nobody(engine: sa.Engine) -> None:
    url = engine.url.render_as_string(hide_password=False)
    program = (
        "import sys, sqlalchemy as sa; from tuner.service.workers import Workers\n"
        f"with Workers(sa.create_engine({url!r})).alone() as is_alone:\n"
        "    print(is_alone, flush=True); sys.stdin.read()"
    )
    workers = Workers(engine)
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"True\n"
            with workers.alone() as is_alone:
                assert not is_alone
        finally:
            child.kill()
    end = time.monotonic() + 600
    while True:  # PostgreSQL learns of it from the connection
        with workers.alone() as is_alone:
            if is_alone:
                return
        assert time.monotonic() < end
        time.sleep(0.05)
