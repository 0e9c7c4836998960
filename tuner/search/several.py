"""Several processes that run one search on one storage: more on this host, or one on each device of a Ray cluster.

Each is the same search: it joins those that run, and the first at the end of the trials writes the result. No other module of a
search imports Ray.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from decoding.errors import SdtuneError, first_line, how_to_install
from tuner.config import SearchConfig
from tuner.errors import ConfigError, SearchError
from tuner.inputs.models import resolve_device
from tuner.progress import Progress

MOST_LOST = 3
"""Times that a device's search begins again after its process or host died."""
CONNECT_SECONDS = 10.0
END_SECONDS = 60.0
"""Seconds for the other processes of this host to show the result before they are stopped; a sixth of it to stop."""

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:  # an optional dependency: `search_on_ray` says what to install
    ray = None


@contextmanager
def workers_beside(config: SearchConfig, arguments: Sequence[str], say: Callable[[str], None]) -> Iterator[None]:
    """Run `config.workers` - 1 further processes of the command with these arguments, each on its own part of this host.

    A part is a GPU, or an equal share of the processors. What a process says is in a file beside the profile. They are stopped with
    this one, also if it is killed. Raises `ConfigError` if there are fewer devices.
    """
    if config.workers == 1:
        yield
        return
    parts = _parts(config)
    command = [sys.executable, "-c", "from tuner.cli.launch import work; work()", *arguments, "--workers", "1"]
    started: dict[Path, subprocess.Popen[bytes]] = {}
    try:
        for number, part in enumerate(parts[1:], start=2):
            _take(part)
            log = Path(f"{config.out}.worker-{number}.log")
            with log.open("wb") as said:
                started[log] = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,  # closed with this process, which stops the worker
                    stdout=said,
                    stderr=said,
                    start_new_session=True,  # Ctrl-C is for this process
                )
        _take(parts[0])
        yield
        end = time.monotonic() + END_SECONDS  # this process has the result, and they show it too
        for log, process in started.items():
            with suppress(subprocess.TimeoutExpired):
                if process.wait(max(0.0, end - time.monotonic())):
                    say(f"a worker ended with status {process.returncode}: see {log}")
    finally:
        for process in started.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in started.values():
            try:
                process.wait(END_SECONDS / 6)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _parts(config: SearchConfig) -> list[str | set[int]]:
    """Return a GPU, by its name for CUDA, or processors for each worker."""
    if resolve_device(config.device).type == "cuda":
        count = torch.cuda.device_count()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        found: list[str | set[int]] = list(visible[: config.workers])
        what = "GPUs"
    else:
        cores = sorted(os.sched_getaffinity(0))
        each = len(cores) // config.workers
        found = [set(cores[number * each : (number + 1) * each]) for number in range(config.workers if each else 0)]
        count, what = len(cores), "processors"
    if len(found) < config.workers:
        raise ConfigError(f"workers: this host has {count} {what}, and each worker needs its own, got {config.workers}")
    return found


def _take(part: str | set[int]) -> None:
    """Let this process, and those that it starts, use this part of the host."""
    if isinstance(part, str):
        os.environ["CUDA_VISIBLE_DEVICES"] = part
    else:
        os.sched_setaffinity(0, part)
        torch.set_num_threads(len(part))


def search_on_ray(config: SearchConfig, progress: Progress) -> None:
    """Run the search on every device of the Ray cluster `config.ray`; return when it has a result, which is in the storage.

    A device whose process or host dies loses its running trial, and begins again where one is free. Raises `SearchError` if none
    ends with a result.
    """
    if ray is None:
        raise ConfigError(f"ray: it is not installed: {how_to_install('ray')}")
    assert config.ray is not None, "the caller has looked"
    host, _, port = config.ray.rpartition(":")
    try:
        if port.isdigit():  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(address=config.ray, logging_level="ERROR", log_to_driver=False, ignore_reinit_error=True)
    except (OSError, RuntimeError, ValueError) as cause:
        raise ConfigError(
            f"ray: no Ray cluster answers at {config.ray!r} ({first_line(cause)}): start one with `ray start --head`"
        ) from None
    try:
        _run_on_ray(config, progress)
    finally:
        ray.shutdown()  # devices that still wait for one, or show the result, are not needed


def _run_on_ray(config: SearchConfig, progress: Progress) -> None:
    reservations = _reservations(config)
    settings = config.model_copy(update={"ray": None}).model_dump(mode="json", exclude_unset=True, exclude={"ray"})
    progress.stage(f"searching on {len(reservations)} Ray devices")
    work = ray.remote(max_retries=MOST_LOST)(_joined)
    left = [work.options(**each).remote(settings, str(Path.cwd())) for each in reservations]
    said: str | None = None
    while left:
        (ended,), left = ray.wait(left)
        try:
            said = ray.get(ended)
        except ray.exceptions.RayError as lost:
            said = first_line(lost, default=type(lost).__name__)
        if said is None:
            return
        progress.say(f"a device ended without a result: {said}")
    raise SearchError(f"no device ended with a result; the last one: {said}")


def _reservations(config: SearchConfig) -> list[dict[str, Any]]:
    """Return what Ray reserves for each device: a GPU, or all processors of a node. Raises `ConfigError` if there is none."""
    resource = "CPU" if config.device == "cpu" else "GPU"
    sizes = {node["NodeID"]: int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]}
    if resource == "GPU":
        found: list[dict[str, Any]] = [{"num_gpus": 1, "num_cpus": 0}] * sum(sizes.values())
    else:
        # Each on its own node while that lives: a smaller one would leave no room on a larger one's.
        found = [
            {"num_cpus": size, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)}
            for node, size in sizes.items()
            if size
        ]
    if not found:
        raise ConfigError(f"ray: the cluster has no {resource}: give --device cpu for its processors")
    return found


def _joined(settings: dict[str, Any], folder: str) -> str | None:
    """Run the search in a process of Ray; return why it failed, or None. Relative paths are those of the command's `folder`."""
    import optuna

    from tuner.search.run import search
    from tuner.search.task import open_budget, prepare
    from tuner.stage_clock import StageClock

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    os.chdir(folder)
    config = SearchConfig.model_validate(settings)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    try:
        search(prepare(config, Progress(), budget=open_budget(config, StageClock())), Progress())
    except SdtuneError as refusal:
        return str(refusal)
    return None
