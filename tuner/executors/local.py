"""The executors of one device in this process: each task runs when it is submitted."""

from __future__ import annotations

from collections import deque
from typing import Any, Generic

from tuner.executors.contract import DeviceT, TrialDevice, Work
from tuner.measuring.contract import Measuring
from tuner.measuring.disturbance import NotWatched


class HereExecutor(Generic[DeviceT]):
    """Runs tasks on a device of this process."""

    num_devices = 1

    def __init__(self, device: DeviceT) -> None:
        self._device = device
        self._ended: deque[tuple[str, Any]] = deque()

    def submit(self, task: str, work: Work[DeviceT]) -> None:
        """Run the work at once; what it raises is raised here."""
        self._ended.append((task, work(self._device)))

    def wait(self) -> tuple[str, Any]:
        """See `Executor.wait`."""
        return self._ended.popleft()


class LocalExecutor(HereExecutor[TrialDevice]):
    """Runs trials on the bench of this process."""

    def __init__(self, bench: Measuring) -> None:
        super().__init__(TrialDevice(bench, NotWatched()))
