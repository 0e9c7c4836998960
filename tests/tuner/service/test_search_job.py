"""A job from HTTP to its profile: service, worker and command line over one database, and a search with planted costs."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.small_search import STUDIES, SearchPlace, finished_trials, planted_prices
from decoding.profile import DraftProfile
from tests.support.service import serving, until, working
from tuner.cli.main import main
from tuner.config import SearchConfig
from tuner.errors import StorageError, TrackingOutageError
from tuner.progress import Progress
from tuner.search.run import search
from tuner.search.task import prepare
from tuner.service.contract import JobResult, JobState
from tuner.service.jobs import Jobs
from tuner.service.worker import WorkerSettings, run_job


def test_a_job_gives_the_profile_that_a_search_gives_and_is_fetched(
    place: SearchPlace, jobs: Jobs, plain_reviews: None
) -> None:
    alone = place.config(
        "alone", study=["conf_layers"], studies={"conf_layers": {**STUDIES["conf_layers"], "max_trials": 4}}
    )
    path = place.folder / "search.yaml"
    path.write_text(json.dumps(alone.model_dump(mode="json", exclude_unset=True)))  # YAML too
    search(replace(prepare(alone, Progress()), prices=planted_prices()), Progress())
    out = place.folder / "fetched.yaml"
    with serving(place.folder, jobs) as command:
        with working(place.folder, jobs, partial(run_job, prices=planted_prices())):
            waited = command("submit", str(path), "--wait", "--out", str(out))
            nowhere = command("submit", str(path), "--wait", "--out", str(place.folder / "absent" / "profile.yaml"))
        assert nowhere.exit_code == 2, "said before the search, not after it"
        assert waited.exit_code == 0, waited.output
        (job,) = jobs.latest()
        assert job.state is JobState.FINISHED
        again = command("submit", str(path))
        assert again.exit_code == 0
        assert f"{job.id}  finished" in again.output
        assert job.verdict is not None
        assert job.verdict in again.output
        assert "best" not in again.output
        assert len(jobs.latest()) == 1
        assert "finished" in command("watch", job.id).output
        fetched = command("fetch", job.id, "--out", str(place.folder / "again.yaml"))
        assert fetched.exit_code == 0
        assert "speed-up" in fetched.output
    assert (place.folder / "again.yaml").read_text() == out.read_text()
    known, found = DraftProfile.load(alone.out), DraftProfile.load(out)
    assert job.verdict == ("decode plainly" if found.measured is None else f"{found.measured.speedup}")
    assert (found.draft, found.draft_length) == (known.draft, known.draft_length)
    trials = [
        finished_trials(storage, experiment)
        for storage, experiment in ((alone.storage, "alone"), (jobs.database, f"model-prompts-{job.id}"))
    ]
    told = [{key: (each.candidate, each.speedup) for key, each in records.items()} for records in trials]
    assert told[0] == told[1]
    assert len(told[0]) == 4


def test_the_engine_of_a_search_is_the_workers(tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def stop(config: SearchConfig, *_: Any, **__: Any) -> Any:
        seen.append((config.deploy_to, config.engine_home, config.engine_args))
        raise StorageError("seen")

    monkeypatch.setattr("tuner.search.task.prepare", stop)
    engine = {"deploy_to": "llama.cpp", "engine_home": str(tmp_path), "engine_args": "--threads 2"}
    settings = WorkerSettings(jobs.database, "sqlite:///mlflow.db", tmp_path, "cpu", engine=engine)
    with pytest.raises(StorageError, match="seen"):
        run_job("a", {"model": "m", "dataset": "d"}, settings, jobs)
    assert seen == [("llama.cpp", tmp_path, "--threads 2")]


def test_a_worker_for_an_engine_that_is_not_named_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["worker", "--engine-home", "x"])
    assert result.exit_code == 2
    assert "engine_home: settings of the engine of deploy_to, which is not given" in result.output
    assert list(tmp_path.iterdir()) == [], "no database was made"


class Troubled:
    """Jobs that raise each of `failures` before they succeed."""

    def __init__(self, *failures: Exception) -> None:
        self.num_run = 0
        self.messages: list[str] = []
        self._failures = list(failures)

    def __call__(self, job: str, config: Mapping[str, Any], settings: WorkerSettings, jobs: Jobs) -> JobResult:
        self.num_run += 1
        self.messages += jobs.find(job).progress.lines
        if self._failures:
            raise self._failures.pop(0)
        return JobResult(profile="", claims_speedup=False, rows=[], report="", mlflow_run="run")


def test_a_search_waits_for_a_store_that_is_away(tmp_path: Path, jobs: Jobs) -> None:
    away, broken = TrackingOutageError("the store is away"), StorageError("another search")
    trouble = Troubled(away, away, broken)
    with serving(tmp_path, jobs) as command, working(tmp_path, jobs, trouble):
        jobs.submit("0123456789abcdef", {"model": "m", "dataset": "d"}, "default")
        until(lambda: jobs.find("0123456789abcdef").state.is_over)
        (found,) = jobs.latest()
        assert (found.state, found.error) == (JobState.FAILED, "another search")
        assert trouble.messages == ["waits: the store is away"] * 2
        watched = command("watch", "0123456789abcdef")
        assert watched.exit_code == 2
        assert "the search 0123456789abcdef is failed: another search" in watched.output
        assert command("resume", "0123456789abcdef").exit_code == 0
        assert command("watch", "0123456789abcdef").exit_code == 0
        assert trouble.num_run == 4


class Counted:
    """Jobs that last until they are let go, and the most of them that ran at a time."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.most = 0
        self.let_go = threading.Event()
        self._running = 0

    def __call__(self, job: str, config: Mapping[str, Any], settings: WorkerSettings, jobs: Jobs) -> JobResult:
        self.ran.append(job)
        self._running += 1
        self.most = max(self.most, self._running)
        self.let_go.wait(600)
        self._running -= 1
        return JobResult(profile="", claims_speedup=False, rows=[], report="", mlflow_run="run")


def test_cancel_and_resume_keep_the_queue(tmp_path: Path, jobs: Jobs) -> None:
    here, elsewhere = "0" * 16, ["1" * 16, "2" * 16, "3" * 16]
    counted = Counted()
    counted.let_go.set()
    for job in elsewhere:
        jobs.submit(job, {"model": "m", "dataset": "d"}, "other-gpu")
        assert (jobs.cancel(job).queue, jobs.resume(job).queue) == ("other-gpu", "other-gpu")
    with working(tmp_path, jobs, counted):
        jobs.submit(here, {"model": "m", "dataset": "d"}, "default")
        jobs.cancel(here)
        jobs.resume(here)
        until(lambda: jobs.find(here).state.is_over)
    assert jobs.find(here).state is JobState.FINISHED
    assert counted.ran == [here]
    assert {jobs.find(job).state for job in elsewhere} == {JobState.QUEUED}


def test_a_worker_never_runs_two_searches_at_once(tmp_path: Path, jobs: Jobs) -> None:
    first, second, third = (str(digit) * 16 for digit in range(3))
    counted = Counted()
    with working(tmp_path, jobs, counted):
        jobs.submit(first, {"model": "m", "dataset": "d"}, "default")
        until(lambda: counted.ran == [first])
        jobs.cancel(first)  # it still ends its trial when the queue gives the worker another one
        for job in (second, third):
            jobs.submit(job, {"model": "m", "dataset": "d"}, "default")
        counted.let_go.set()
        until(lambda: jobs.find(second).state.is_over and jobs.find(third).state.is_over)
    assert counted.most == 1
    assert sorted(counted.ran) == [first, second, third]
    assert jobs.find(first).state is JobState.CANCELLED
