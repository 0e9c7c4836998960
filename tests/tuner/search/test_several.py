"""`sdtune search --workers N` and `--ray ADDRESS`: processes that the command starts, and that end with it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from benchmarks.small_search import SearchPlace
from decoding.profile import DraftProfile
from studies.contract import TrialRecord
from tests.support.paths import ROOT
from tests.support.refusals import refused
from tests.support.stored_trials import stored_trials
from tuner.cli.main import main
from tuner.measuring.paired import Bench
from tuner.search.storage import StudyStore

LIMIT_SECONDS = 300
STUDY, NUM_TRIALS, NUM_OF_WORKERS = "tpe", 8, 6


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
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(place.folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with (place.folder / "said.txt").open("wb") as said:
        return subprocess.Popen(
            [*command, str(place.folder / "given.yaml"), *arguments],
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
def test_workers_measure_trials_together_and_all_show_the_result(
    place: SearchPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process is that of the test; it has one trial, and goes on when its worker has one."""
    log, begun = Path(f"{place.profile('search')}.worker-2.log"), iter(range(99))
    measure, processors = Bench.measure, os.sched_getaffinity(0)

    def patient(*given: Any, **settings: Any) -> Any:
        end, is_second = time.monotonic() + LIMIT_SECONDS, next(begun) == 1
        while is_second and f"  {STUDY}/" not in log.read_text():
            assert time.monotonic() < end
            time.sleep(0.05)
        return measure(*given, **settings)

    monkeypatch.setattr(Bench, "measure", patient)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = [
        "search",
        "--config",
        str(place.folder / "given.yaml"),
        "--workers",
        "2",
        "--trials",
        f"{NUM_OF_WORKERS}",
    ]
    monkeypatch.setattr("sys.argv", ["sdtune", *arguments])
    try:
        ended = CliRunner().invoke(main, arguments)
    finally:
        os.sched_setaffinity(0, processors)
        torch.set_num_threads(1)
    assert ended.exit_code == 0, ended.output
    assert f"{place.profile('search')}" in log.read_text(), "the worker shows the result too"
    DraftProfile.load(place.profile("search"))
    assert len(_records(place)) == NUM_OF_WORKERS
    assert set(_states(place)) <= {"COMPLETE", "PRUNED", "FAIL"}


WORKER = """
import sys, time, types
program = types.ModuleType("tuner.cli.main")
program.main = lambda: (print("begun", flush=True), time.sleep(600))
sys.modules["tuner.cli.main"] = program
from tuner.cli.launch import work
work()
"""


def test_a_worker_ends_with_the_process_that_started_it() -> None:
    """Also where a shell started it in the background, which ignores SIGINT."""
    command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-c", WORKER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"begun\n"
        _, said = worker.communicate(timeout=LIMIT_SECONDS)  # closes its stdin, as the end of this process would
    assert b"KeyboardInterrupt" in said


def test_a_cluster_that_is_not_there_is_refused_at_once(place: SearchPlace) -> None:
    pytest.importorskip("ray")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    refused(
        CliRunner().invoke(main, ["search", "--config", str(place.folder / "given.yaml"), "--ray", address]),
        f"no Ray cluster answers at '{address}'",
        "ray start --head",
    )


def test_a_killed_node_of_a_ray_cluster_loses_its_running_trial_alone(place: SearchPlace) -> None:
    ray_clusters = pytest.importorskip("ray.cluster_utils")
    said = place.folder / "said.txt"
    cluster = ray_clusters.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        killed = cluster.add_node(num_cpus=2)  # no other node is as large
        # One thread on each: nodes of different sizes would be different devices.
        search = _start(place, "--ray", cluster.address, "--device", "cpu", "--threads", "1")
        _wait(lambda: len(_records(place)) > 1 and _states(place)["RUNNING"] > 1, search, said)
        before = _records(place)
        cluster.remove_node(killed, allow_graceful=False)
        assert search.wait(LIMIT_SECONDS) == 0, said.read_text()
    finally:
        cluster.shutdown()
    after = _records(place)
    assert {number: after[number] for number in before} == before
    assert len(after) == NUM_TRIALS
    assert set(_states(place)) <= {"COMPLETE", "PRUNED", "FAIL"}
    DraftProfile.load(place.profile("search"))
