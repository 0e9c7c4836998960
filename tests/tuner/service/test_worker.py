"""Workers as processes: one is killed, another takes over its job."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tuner.service.contract import JobProgress, JobState
from tuner.service.jobs import Jobs
from tuner.service.worker import EXIT_TAKEN_FOR_DEAD

Start = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A file, or PostgreSQL where a test asks for it."""
    of = getattr(request, "param", "sqlite")
    return f"sqlite:///{tmp_path / 'jobs.db'}" if of == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
def jobs(database: str) -> Iterator[Jobs]:
    jobs = Jobs(database)
    yield jobs
    jobs.close()


@pytest.fixture
def start(database: str, tmp_path: Path) -> Iterator[Start]:
    """A function that starts a worker."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.support.service_worker", database, str(tmp_path)]
        started.append(subprocess.Popen(command, cwd=ROOT))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
def test_the_job_of_a_killed_worker_is_taken_over(jobs: Jobs, start: Start, tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    first = start()
    assert jobs.submit("killed", {"model": "m", "dataset": "d"}, "default")
    assert not jobs.submit("killed", {"model": "m", "dataset": "d"}, "default")
    log = tmp_path / "killed.log"
    _until(lambda: log.exists() and log.read_text() == "begun\n")
    assert [card.job for card in jobs.workers.cards()] == ["killed"]
    assert jobs.find("killed").state is JobState.RUNNING
    first.kill()
    first.wait()
    (tmp_path / "hold").unlink()
    start()
    _until(lambda: jobs.find("killed").state.is_over)
    assert jobs.find("killed").state is JobState.FINISHED
    assert log.read_text() == 2 * "begun\n"
    result = jobs.result("killed")
    assert result is not None
    assert result.profile == "found"
    _until(lambda: [card.job for card in jobs.workers.cards()] == [None])  # the dead worker was cleared away


def test_a_search_that_workers_die_of_fails_and_is_not_taken_a_third_time(
    jobs: Jobs, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "hold").touch()
    jobs.submit("deadly", {"model": "m", "dataset": "d"}, "default")
    log = tmp_path / "deadly.log"
    for number in range(1, 4):
        assert jobs.find("deadly").state is not JobState.FAILED, "one death may have any reason"
        worker = start()
        wanted = number * "begun\n"
        _until(lambda wanted=wanted: log.exists() and log.read_text() == wanted)  # type: ignore[misc]
        if number < 3:  # it goes on, and so did not die of the search
            jobs.note_progress("deadly", JobProgress(stage="joint", trials=1))
        worker.kill()
        worker.wait()
    start()
    _until(lambda: jobs.find("deadly").state.is_over)
    found = jobs.find("deadly")
    assert (found.state, found.error) == (
        JobState.FAILED,
        "2 workers died with this search, one after the other: see their logs",
    )
    assert found in jobs.latest()
    assert jobs.take_over() == []
    (tmp_path / "hold").unlink()
    jobs.resume("deadly")
    _until(lambda: jobs.find("deadly").state.is_over)
    assert jobs.find("deadly").state is JobState.FINISHED, "who resumes it has removed the reason"
    assert log.read_text() == 4 * "begun\n"


def test_a_worker_that_was_taken_for_dead_ends_and_its_search_runs_elsewhere(
    jobs: Jobs, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "hold").touch()
    silent = start()
    jobs.submit("taken", {"model": "m", "dataset": "d"}, "default")
    log = tmp_path / "taken.log"
    _until(lambda: log.exists() and log.read_text() == "begun\n")
    (worker,) = jobs.workers.cards()
    jobs.workers.remove(worker.name)  # as another machine does after a minute of silence
    assert silent.wait(600) == EXIT_TAKEN_FOR_DEAD
    (tmp_path / "hold").unlink()
    start()
    _until(lambda: jobs.find("taken").state.is_over)
    assert jobs.find("taken").state is JobState.FINISHED
