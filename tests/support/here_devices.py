"""Devices of a cluster that are objects of this process: real workers, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from tests.support.benches import per_token
from tuner.executors import ray_cluster
from tuner.executors.ray_cluster import DeviceClass

Before = Callable[[str, str], None]
"""Called with the name of a device and the method that is asked for; it may raise that the device is lost."""


class HereDevices:
    """Takes the place of the devices of a cluster: two, unless a search asks for fewer. Seconds are planted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Before = lambda name, method: None) -> None:
        self.opened: list[str] = []
        self.before = before
        monkeypatch.setattr(ray_cluster, "connect", lambda address: None)
        monkeypatch.setattr(ray_cluster, "find_devices", lambda label, kind, most=None: DeviceClass(most or 2, {}))
        monkeypatch.setattr(ray_cluster, "RayDevice", self._device)
        monkeypatch.setattr("tuner.executors.worker.WallClock", lambda device: per_token(plain=2.0))

    def _device(
        self, number: int, reservation: Mapping[str, Any], worker: Any, arguments: Any, device: Any, *, label: str
    ) -> _HereDevice:
        return _HereDevice(self, f"{label} {number}", worker(), arguments, device)


class _HereDevice:
    """Takes the place of `RayDevice`."""

    def __init__(self, owner: HereDevices, name: str, worker: Any, arguments: Sequence[Any], device: Any) -> None:
        self.name = name
        self._owner, self._worker, self._arguments, self._device = owner, worker, arguments, device

    def open(self) -> Any:
        """See `DeviceConnection.open`."""
        assert self._worker.ask("open", *self._arguments) == {}
        self._owner.opened.append(self.name)
        return self._device(self._ask, self.name)

    def _ask(self, method: str, *arguments: Any) -> Any:
        self._owner.before(self.name, method)
        return self._worker.ask(method, *arguments)

    def close(self) -> None:
        """See `DeviceConnection.close`."""
