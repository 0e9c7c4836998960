"""Trials on the devices of a Ray cluster of this machine, whose GPUs are names: shared out, pinned to labels, redone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from threading import Event, Semaphore
from typing import Any

import pytest

from tests.support.device_worker import BrokenWorker, PlaceWorker
from tuner.errors import ConfigError
from tuner.executors import ray_cluster
from tuner.executors.contract import TrialDevice
from tuner.executors.pool import DevicePool
from tuner.executors.ray_cluster import RayDevice, connect, find_devices
from tuner.executors.remote import trial_device

pytestmark = [
    # Ray leaves the processes of a cluster to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with one GPU of class b, and two nodes of class a, with two GPUs and one."""
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "num_gpus": 1, "labels": {"device": "b"}, "include_dashboard": False},
    )
    try:
        made.add_node(num_cpus=2, num_gpus=2, labels={"device": "a"})
        made.add_node(num_cpus=2, num_gpus=1, labels={"device": "a"})
        connect(made.address)
        yield made
    finally:
        ray_cluster.ray.shutdown()
        made.shutdown()


def _place(device: TrialDevice) -> str:
    device.watch.begin()
    return device.watch.found() or ""


def _nodes(label: str) -> set[str]:
    return {each["NodeID"] for each in ray_cluster.ray.nodes() if each["Alive"] and each["Labels"]["device"] == label}


def test_what_is_not_there_is_refused_with_what_is(cluster: Any) -> None:
    with pytest.raises(ConfigError, match=r"no GPU on nodes with the label device=c; labels there are: a, b$"):
        find_devices("c", "cuda")
    with pytest.raises(ConfigError, match="the nodes have 1 and 2 CPUs"):
        find_devices(None, "cpu")
    assert find_devices("a", "cpu").count == 2, "a node is one device where the model runs on its processors"
    assert find_devices(None, "cuda").count == 4
    assert find_devices("a", "cuda", most=2).count == 2


def test_trials_stay_on_their_label_alone_on_a_device_and_are_redone_when_a_node_is_killed(cluster: Any) -> None:
    said: list[str] = []
    found = find_devices("a", "cuda")
    assert found.count == 3
    of_class = _nodes("a")
    devices = [
        RayDevice(
            number, found.reservation, PlaceWorker, [], partial(trial_device, range(2)), label="a", patience=120.0
        )
        for number in range(found.count)
    ]
    with DevicePool(devices, said.append) as pool:
        for number in range(9):
            pool.submit(f"trial {number}", _place)
        ended = dict(pool.wait() for _ in range(9))
        places = [each.split() for each in ended.values()]
        assert {node for node, *_ in places} == of_class
        uses: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for node, gpu, start, end in places:
            uses[node, gpu].append((float(start), float(end)))
        assert len(uses) == 3
        for of_device in uses.values():
            of_device.sort()
            assert all(end <= start for (_, end), (start, _) in pairwise(of_device))

        two_gpus = max(uses, key=lambda use: use[1])[0]
        (killed,) = [each for each in cluster.worker_nodes if each.node_id == two_gpus]
        begun, is_killed = Semaphore(0), Event()

        def place_until_the_kill(device: TrialDevice) -> str:
            begun.release()
            while True:
                found = _place(device)
                if is_killed.is_set():
                    return found

        for number in range(9, 15):
            pool.submit(f"trial {number}", place_until_the_kill)
        for _ in range(3):  # on every device
            assert begun.acquire(timeout=60)
        cluster.remove_node(killed, allow_graceful=False)
        is_killed.set()
        ended = dict(pool.wait() for _ in range(6))
    assert ended.keys() == {f"trial {number}" for number in range(9, 15)}, "no trial is missing, none ended twice"
    redone = [f"trial {each.split()[-3]}" for each in said if each.endswith("is redone")]
    assert redone
    assert two_gpus not in {ended[number].split()[0] for number in redone}


def test_a_process_that_cannot_begin_ends_the_search_at_once(cluster: Any) -> None:
    reservation = find_devices("b", "cuda").reservation
    device = RayDevice(0, reservation, BrokenWorker, [], partial(trial_device, range(2)), label="b", patience=60.0)
    with pytest.raises(ConfigError, match="b 0: its process could not begin: ImportError: No module named 'decoding'"):
        DevicePool([device], print).__enter__()


def test_ray_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'sdtune\[ray\]'"):
        connect("auto")
