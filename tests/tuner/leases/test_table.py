"""Leases, on SQLite and PostgreSQL."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread

import pytest
import sqlalchemy as sa

from tests.support.processes import ended_process
from tuner.leases.process import Process
from tuner.leases.table import LeaseHeldError, LeaseLostError, LeaseTable

ELSEWHERE = replace(Process.current(), host="another", place="elsewhere")


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    url = (
        f"sqlite:///{tmp_path / 'leases.db'}" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    )
    engine = sa.create_engine(url)
    _forget_leases(engine)  # those that other tests have left in the same database
    yield engine
    _forget_leases(engine)
    engine.dispose()


def _forget_leases(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE IF EXISTS sdtune_leases"))


def test_a_lease_has_one_holder(engine: sa.Engine) -> None:
    table = LeaseTable(engine)
    lease = table.take("a", facts="first")
    with pytest.raises(LeaseHeldError, match=r"a is held by process \d+ on .*, last heard of 0 s ago"):
        table.take("a")
    (holder,) = table.holders("a")
    assert (holder.process, holder.facts) == (Process.current(), "first")
    assert table.is_held("a", lease.token)
    lease.tell("second")
    assert [holder.facts for holder in table.holders("")] == ["second"]
    lease.release()
    assert table.holder("a") is None
    with table.take("a"):
        pass
    assert table.holders("") == []


def test_the_lease_of_an_ended_process_of_this_machine_is_free_at_once(engine: sa.Engine) -> None:
    dead = LeaseTable(engine, process=ended_process()).take("a")
    mine = LeaseTable(engine).take("a")
    mine.check()
    with pytest.raises(LeaseLostError, match="a was taken over by another process"):
        dead.check()
    with pytest.raises(LeaseLostError):
        dead.tell("still here")
    dead.release()
    assert LeaseTable(engine).is_held("a", mine.token), "what is lost cannot be given back"


def test_a_silent_process_of_another_machine_is_dead_after_the_grace_period(engine: sa.Engine) -> None:
    LeaseTable(engine, process=ELSEWHERE).take("a")
    with pytest.raises(LeaseHeldError):
        LeaseTable(engine).take("a")
    holder = LeaseTable(engine).holder("a")
    assert holder is not None
    assert not holder.is_dead(60.0)
    LeaseTable(engine, grace=0.0).take("a")


def test_a_living_process_of_this_machine_is_not_dead_whatever_a_clock_says(engine: sa.Engine) -> None:
    """A clock that steps forward makes every holder silent for the length of the step."""
    lease = LeaseTable(engine).take("a")
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE sdtune_leases SET beat = beat - 86400"))
    with pytest.raises(LeaseHeldError, match="last heard of 86400 s ago"):
        LeaseTable(engine).take("a")
    assert LeaseTable(engine).is_held("a", lease.token)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE sdtune_leases SET beat = beat + 2 * 86400"))
    with pytest.raises(LeaseHeldError, match="last heard of 0 s ago"):
        LeaseTable(engine).take("a")
    lease.check()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_later_process_of_the_same_number_holds_no_lease(engine: sa.Engine) -> None:
    me = Process.current()
    assert me.started is not None
    LeaseTable(engine, process=replace(me, started=me.started - 1)).take("a")
    LeaseTable(engine).take("a").check()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_ended_and_was_not_waited_for_is_dead(engine: sa.Engine) -> None:
    """`kill -9` leaves one behind until its parent asks for it."""
    with subprocess.Popen(["sleep", "600"]) as child:
        started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        LeaseTable(engine, process=replace(Process.current(), pid=child.pid, started=started)).take("a")
        try:
            with pytest.raises(LeaseHeldError):
                LeaseTable(engine).take("a")
        finally:
            child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        LeaseTable(engine).take("a").check()


def test_a_lease_that_could_not_be_given_back_is_free_again(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database failed, and the process goes on with other work."""
    table = LeaseTable(engine)
    lease = table.take("a")
    monkeypatch.setattr(table, "_changed", _no_database)
    with pytest.raises(sa.exc.OperationalError):
        lease.release()
    LeaseTable(engine).take("a").check()


def _no_database(statement: object) -> bool:
    raise sa.exc.OperationalError("DELETE", {}, Exception("the database is gone"))


def test_signs_of_life_keep_a_lease_until_they_stop(engine: sa.Engine) -> None:
    start = time.monotonic()
    lease = LeaseTable(engine, process=ELSEWHERE, beat=0.01).take("a")
    table = LeaseTable(engine)

    def silence() -> float:
        holder = table.holder("a")
        assert holder is not None
        return holder.silent_seconds

    _until(lambda: silence() < time.monotonic() - start - 0.05)
    lease.stop()
    _until(lambda: silence() > 0.1)


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end


def test_of_many_that_take_a_dead_lease_at_once_one_gets_it(engine: sa.Engine) -> None:
    LeaseTable(engine, process=ended_process()).take("a")
    barrier, got, refused = Barrier(4), list[str](), list[str]()

    def take() -> None:
        table = LeaseTable(engine)
        barrier.wait()
        try:
            got.append(table.take("a").token)
        except LeaseHeldError as held:
            refused.append(held.holder.token)

    threads = [Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == got * 3


def test_who_is_patient_gets_what_is_released(engine: sa.Engine) -> None:
    held = LeaseTable(engine).take("a")
    waiting = Thread(target=lambda: LeaseTable(engine).take("a", patience=20).release())
    waiting.start()
    held.release()
    waiting.join()
    assert LeaseTable(engine).holder("a") is None
