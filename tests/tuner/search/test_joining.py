"""Processes that run one search: each joins the others, a killed one loses its running trial, and all end with one result."""

from __future__ import annotations

import os
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import mlflow
import pytest

from benchmarks.small_search import SearchPlace
from tests.support.quick_search import quick_planted_search
from tests.support.stored_trials import stored_trials
from tuner.progress import Progress


@pytest.fixture
def place(tmp_path: Path, _tracking_template: Path) -> SearchPlace:
    place = SearchPlace.made(tmp_path)
    shutil.copy(_tracking_template, place.database("tracking"))
    return place


def _start(place: SearchPlace, name: str, said: str) -> BaseProcess:
    return place.process(said, quick_planted_search, place.config(name), Progress())


def _check(place: SearchPlace, name: str) -> None:
    names = [f"{name}/conf_layers", f"{name}/exit_layer"]
    trials = stored_trials(place.database("trials"), *names)
    assert {trial.state.name for trial in trials} <= {"COMPLETE", "PRUNED", "FAIL"}, "none waits or runs for ever"
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{place.database('tracking')}")
    runs = client.search_runs([client.get_experiment_by_name(name).experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert parent.info.status == "FINISHED"
    nested = [(run.data.tags["sdtune.study"], int(run.data.tags["sdtune.trial"])) for run in runs if run is not parent]
    of_records = {(study, number) for study, number in place.records(name)}
    assert sorted(nested) == sorted(of_records), "each trial has one run"


def test_processes_join_one_search_and_a_killed_one_loses_its_running_trial(place: SearchPlace) -> None:
    alone = _start(place, "alone", "alone")
    killed, end = _start(place, "joined", "killed"), time.monotonic() + 600
    while len(place.records("joined")) < 2:
        assert time.monotonic() < end
        assert killed.is_alive(), "it ended by itself"
        time.sleep(0.05)
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    before = place.records("joined")
    processes = [alone, *(_start(place, "joined", f"joined-{number}") for number in range(2))]
    for process in processes:
        process.join(600)
        assert process.exitcode == 0
    after = place.records("joined")
    assert {key: after[key] for key in before} == before, "no finished trial is lost"
    assert place.winner("joined") == place.winner("alone"), "of a search that one process runs to its end"
    _check(place, "joined")
