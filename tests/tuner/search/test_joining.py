"""Processes that run one search: each joins the others, a killed one loses its running trial, and all end with one result."""

from __future__ import annotations

import os
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import mlflow
import pytest

from benchmarks.small_search import SearchPlace
from tests.support.stored_trials import stored_trials


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, _tracking_template: Path) -> SearchPlace:
    place = SearchPlace.made(tmp_path_factory.mktemp("joining"))
    shutil.copy(_tracking_template, place.database("tracking"))
    return place


@pytest.fixture(scope="module")
def undisturbed(place: SearchPlace) -> Any:
    """The winner of a search that one process runs to its end."""
    _ended(place.start("alone"))
    return place.winner("alone")


def _ended(process: BaseProcess) -> None:
    process.join(600)
    assert process.exitcode == 0


def _check(place: SearchPlace, name: str, undisturbed: Any) -> None:
    assert place.winner(name) == undisturbed
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


def test_two_processes_join_one_search(place: SearchPlace, undisturbed: Any) -> None:
    processes = [place.start("joined") for _ in range(2)]
    for process in processes:
        _ended(process)
    _check(place, "joined", undisturbed)


def test_a_killed_search_goes_on_to_the_same_winner(place: SearchPlace, undisturbed: Any) -> None:
    killed, end = place.start("killed"), time.monotonic() + 600
    while len(place.records("killed")) < 2:
        assert time.monotonic() < end
        assert killed.is_alive(), "it ended by itself"
        time.sleep(0.05)
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    before = place.records("killed")
    _ended(place.start("killed"))
    after = place.records("killed")
    assert {key: after[key] for key in before} == before, "no finished trial is lost"
    _check(place, "killed", undisturbed)
