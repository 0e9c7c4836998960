"""A Ray cluster of processes on this machine, whose nodes count as devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tuner.errors import ConfigError
from tuner.executors.ray_cluster import connect, disconnect

CLASS = "planted"
"""Label of the nodes."""


@contextmanager
def cluster_of(devices: int) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a cluster to which this process is connected, and its nodes. Raises `ConfigError` if Ray is not installed."""
    try:
        from ray.cluster_utils import Cluster
    except ImportError:
        raise ConfigError("ray is not installed: pip install 'sdtune[ray]'") from None
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [add_node(cluster) for _ in range(devices)]
        connect(cluster.address)
        yield cluster, nodes
    finally:
        disconnect()
        cluster.shutdown()


def add_node(cluster: Any) -> Any:
    """Add a node, which is one device, to the cluster and return it."""
    return cluster.add_node(num_cpus=1, labels={"device": CLASS})
