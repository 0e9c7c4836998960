"""Devices of a cluster that are objects of this process: real workers, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.support.benches import per_token
from tuner.executors import ray_cluster
from tuner.executors.contract import TrialDevice
from tuner.executors.ray_cluster import DeviceClass
from tuner.executors.remote import RemoteBench, RemoteWatch
from tuner.executors.worker import DeviceWorker

Before = Callable[[str, str], None]
"""Called with the name of a device and the method that is asked for; it may raise that the device is lost."""


class HereDevices:
    """Takes the place of the devices of a cluster: of two, unless a search asks for fewer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Before = lambda name, method: None) -> None:
        self.opened: list[str] = []
        self.before = before
        monkeypatch.setattr(ray_cluster, "connect", lambda address: None)
        monkeypatch.setattr(ray_cluster, "find_devices", lambda label, kind, most=None: DeviceClass(most or 2, {}))
        monkeypatch.setattr(ray_cluster, "RayDevice", self._device)

    def _device(
        self, number: int, reservation: Mapping[str, Any], indices: Any, arguments: Any, *, label: str | None
    ) -> _HereDevice:
        return _HereDevice(self, f"{label} {number}", indices, arguments)


class _HereDevice:
    """Takes the place of `RayDevice`: its worker charges the prices of the search, or as much for each token."""

    def __init__(self, owner: HereDevices, name: str, indices: Any, arguments: Any) -> None:
        self.name = name
        self._owner, self._worker, self._indices, self._arguments = owner, DeviceWorker(), indices, arguments

    def open(self) -> TrialDevice:
        """See `DeviceConnection.open`."""
        spec, prices = self._arguments
        assert self._worker.open(spec, prices or per_token(plain=2.0)) == {}
        self._owner.opened.append(self.name)
        return TrialDevice(RemoteBench(self._ask, self._indices), RemoteWatch(self._ask), self.name)

    def _ask(self, method: str, *arguments: Any) -> Any:
        self._owner.before(self.name, method)
        return self._worker.ask(method, *arguments)

    def close(self) -> None:
        """See `DeviceConnection.close`."""
