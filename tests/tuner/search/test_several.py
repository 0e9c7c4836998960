"""`sdtune search --workers N` and `--ray ADDRESS`: processes that the command starts, and that end with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from benchmarks.small_search import SearchPlace
from decoding.profile import DraftProfile
from studies.contract import TrialRecord
from tests.support.stored_trials import stored_trials
from tuner.search.storage import StudyStore

LIMIT_SECONDS = 300
STUDY, NUM_TRIALS = "tpe", 16


@pytest.fixture
def place(tmp_path: Path, _tracking_template: Path) -> SearchPlace:
    place = SearchPlace.made(tmp_path)
    shutil.copy(_tracking_template, place.database("tracking"))
    changes = {"study": [STUDY], "studies": {}, "trials": NUM_TRIALS, "prompts_per_trial": 2, "threads": None}
    settings = place.config("search", **changes).model_dump(mode="json", exclude_unset=True, exclude={"threads"})
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(settings))
    return place


def _start(place: SearchPlace, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from tuner.cli.launch import launch; launch()", "search", "--config"]
    # As a shell starts a background job, which ignores SIGINT.
    in_background = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(place.folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with (place.folder / "said.txt").open("wb") as said:
        return subprocess.Popen(
            [*in_background, *command, str(place.folder / "given.yaml"), *arguments],
            stdout=said,
            stderr=said,
            env=environment,
        )


def _wait(until: Callable[[], bool], search: subprocess.Popen[bytes], said: Path) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not until():
        assert search.poll() is None, said.read_text()
        assert time.monotonic() < end
        time.sleep(0.05)


def _records(place: SearchPlace) -> dict[int, TrialRecord]:
    """The finished trials so far, by number."""
    if not place.database("trials").exists():
        return {}
    store = StudyStore(f"sqlite:///{place.database('trials')}", "search")
    try:
        stored = store.find(STUDY)
        return {} if stored is None else {record.number: record for record in stored.records()}
    finally:
        store.close()


def _states(place: SearchPlace) -> Counter[str]:
    return Counter(trial.state.name for trial in stored_trials(place.database("trials"), f"search/{STUDY}"))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a worker needs a processor of its own")
def test_workers_measure_trials_together_and_end_with_the_first_process(place: SearchPlace) -> None:
    said, log = place.folder / "said.txt", Path(f"{place.profile('search')}.worker-2.log")

    def both_measured() -> bool:
        return all(each.exists() and f"  {STUDY}/" in each.read_text() for each in (said, log))

    killed = _start(place, "--workers", "2")
    _wait(both_measured, killed, said)
    (worker,) = (each for each in psutil.Process(killed.pid).children() if "work()" in " ".join(each.cmdline()))
    killed.kill()
    killed.wait()
    worker.wait(LIMIT_SECONDS)
    assert "sdtune: interrupted" in log.read_text()
    ended = _start(place, "--workers", "2")
    assert ended.wait(LIMIT_SECONDS) == 0, said.read_text()
    assert f"{place.profile('search')}" in log.read_text(), "the worker shows the result too"
    DraftProfile.load(place.profile("search"))
    assert len(_records(place)) == NUM_TRIALS
    assert set(_states(place)) <= {"COMPLETE", "PRUNED", "FAIL"}


def test_a_killed_node_of_a_ray_cluster_loses_its_running_trial_alone(place: SearchPlace) -> None:
    ray_clusters = pytest.importorskip("ray.cluster_utils")
    said = place.folder / "said.txt"
    cluster = ray_clusters.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=size) for size in (2, 1)]  # no other node is as large as the killed one
        # One thread on each: nodes of different sizes would be different devices.
        search = _start(place, "--ray", cluster.address, "--device", "cpu", "--threads", "1")
        _wait(lambda: len(_records(place)) > 1 and _states(place)["RUNNING"] > 1, search, said)
        before = _records(place)
        cluster.remove_node(nodes[0], allow_graceful=False)
        assert search.wait(LIMIT_SECONDS) == 0, said.read_text()
    finally:
        cluster.shutdown()
    after = _records(place)
    assert {number: after[number] for number in before} == before
    assert len(after) == NUM_TRIALS
    assert set(_states(place)) <= {"COMPLETE", "PRUNED", "FAIL"}
    DraftProfile.load(place.profile("search"))
