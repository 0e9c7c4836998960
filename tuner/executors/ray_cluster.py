"""The devices of a Ray cluster: found by label, reserved by an actor each, and given back at the end.

An actor takes a whole GPU, or, where the model runs on the CPU, all processors of a node, so that Ray never lets two tasks share a
device. There are never more actors than devices: an actor that waits for a device could take the one of an actor that restarts. No
other module of a search imports Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from decoding.errors import first_line
from tuner.config import SearchConfig
from tuner.errors import ConfigError
from tuner.executors.contract import DeviceLostError, DeviceT, RemoteTrialError
from tuner.executors.remote import Ask

LABEL = "device"
"""Ray label of a node with the class of its devices: `ray start --labels device=H100`."""
PATIENCE_SECONDS = 600.0
"""Seconds to wait for a device: for its process at the beginning, and for its host after it was lost."""
PAUSE_SECONDS = 1.0
"""Seconds between two questions whether a lost device is back."""

try:
    import ray
except ImportError:  # an optional dependency: `connect` says what to install
    ray = None


@dataclass(frozen=True)
class DeviceClass:
    """Devices of one kind in a cluster, and what Ray reserves for one of them."""

    count: int
    reservation: Mapping[str, Any]
    """Options of an actor."""


def connect(address: str) -> None:
    """Connect this process to the cluster at `address`, or `auto`. Nothing happens if it is connected.

    Raises `ConfigError` if Ray is not installed or no cluster answers.
    """
    if ray is None:
        raise ConfigError("executor: ray is not installed: pip install 'sdtune[ray]'")
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as cause:
        raise ConfigError(
            f"ray_address: no Ray cluster answers at {address!r} ({first_line(cause)}): start one with `ray start --head`"
        ) from None


def check_devices(config: SearchConfig, device_type: str) -> None:
    """Connect to the cluster of `config`. Raises `ConfigError` if it has no devices of the label and of the type."""
    connect(config.ray_address)
    find_devices(config.ray_label, device_type)


def disconnect() -> None:
    """Close the connection of this process."""
    ray.shutdown()


def find_devices(label: str | None, device_type: str, *, most: int | None = None) -> DeviceClass:
    """Return the devices of the nodes whose label `LABEL` is `label`, or of all nodes, `most` at most.

    Raises `ConfigError` if there are none, or if processors of different numbers are to count as one kind of device.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    chosen = [node for node in nodes if label is None or node["Labels"].get(LABEL) == label]
    resource = "GPU" if device_type == "cuda" else "CPU"
    sizes = [int(size) for node in chosen if (size := node["Resources"].get(resource, 0)) >= 1]
    if not sizes:
        known = sorted({str(node["Labels"][LABEL]) for node in nodes if LABEL in node["Labels"]})
        where = "in the cluster" if label is None else f"on nodes with the label {LABEL}={label}"
        raise ConfigError(
            f"ray_label: no {resource} {where}; labels there are: {', '.join(known) or f'none (ray start --labels {LABEL}=NAME)'}"
        )
    if resource == "CPU" and len(set(sizes)) > 1:
        raise ConfigError(
            f"ray_label: the nodes have {' and '.join(map(str, sorted(set(sizes))))} CPUs, and their trials could not be compared: "
            f"give those of one kind a label (ray start --labels {LABEL}=NAME) and name it"
        )
    own: dict[str, Any] = {"num_gpus": 1, "num_cpus": 0} if resource == "GPU" else {"num_cpus": sizes[0]}
    if label is not None:
        own["label_selector"] = {LABEL: label}
    count = sum(sizes) if resource == "GPU" else len(sizes)
    return DeviceClass(min(count, most or count), own)


class RayDevice(Generic[DeviceT]):
    """The connection to one device; see `DeviceConnection`. Its actor starts at once, and again after its process or host died."""

    def __init__(
        self,
        number: int,
        reservation: Mapping[str, Any],
        worker: Callable[[], Any],
        arguments: Sequence[Any],
        device: Callable[[Ask, str], DeviceT],
        *,
        label: str | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """`worker` makes the object in the device's process: its method `ask` is called with `open` and the `arguments` first.

        `device` returns what tasks get: it takes the function that asks the worker, and the name of the device.
        """
        self._label, self._number = label or "device", number
        self._arguments, self._device, self._patience = arguments, device, patience
        self._is_closed = False
        self._actor = ray.remote(max_restarts=-1, max_task_retries=0, **reservation)(worker).remote()

    @property
    def name(self) -> str:
        """Label and number, as records name the device."""
        return f"{self._label} {self._number}"

    def open(self) -> DeviceT:
        """Let the device load the model and return it. Waits for `patience` seconds for a process on it; see `DeviceConnection`."""
        until = time.monotonic() + self._patience
        while True:
            try:
                answer = self._ask("open", *self._arguments, until=until)
                break
            except DeviceLostError:
                if self._is_closed or time.monotonic() >= until:
                    raise
                time.sleep(PAUSE_SECONDS)
        if "error" in answer:
            raise ConfigError(f"{self.name}: {answer['error']}")
        return self._device(self._ask, self.name)

    def close(self) -> None:
        """End the actor."""
        self._is_closed = True
        ray.kill(self._actor)

    def _ask(self, method: str, *arguments: Any, until: float | None = None) -> Any:
        """Return the worker's answer; see `Ask`. Until the time `until`, if there is one, it may wait for the worker to start."""
        seconds = None if until is None else max(0.0, until - time.monotonic())
        try:
            answer = ray.get(self._actor.ask.remote(method, *arguments), timeout=seconds)
        except ray.exceptions.GetTimeoutError:
            raise DeviceLostError(f"no process was ready on it within {self._patience:.0f} s") from None
        except ray.exceptions.RayTaskError as error:
            raise RemoteTrialError(first_line(error.cause, default=type(error.cause).__name__)) from None
        except ray.exceptions.RayError as lost:
            if isinstance(lost, ray.exceptions.RayActorError) and lost.actor_init_failed:
                # Ray does not start such a process again: sdtune, or one of its packages, is missing there or another version.
                reason = str(lost).strip().splitlines()[-1]
                raise ConfigError(f"{self.name}: its process could not begin: {reason}") from None
            raise DeviceLostError(type(lost).__name__) from None
        if "lost" in answer:
            raise DeviceLostError(answer["lost"])
        return answer
