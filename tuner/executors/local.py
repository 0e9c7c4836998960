"""The executor of a search on one device: each trial runs when it is submitted, in this process."""

from __future__ import annotations

from collections import deque
from typing import Any

from tuner.executors.contract import TrialDevice, Work
from tuner.measuring.contract import Measuring
from tuner.measuring.disturbance import NotWatched


class LocalExecutor:
    """Runs trials on the bench of this process."""

    num_devices = 1

    def __init__(self, bench: Measuring) -> None:
        self._device = TrialDevice(bench, NotWatched())
        self._ended: deque[tuple[str, Any]] = deque()

    def submit(self, task: str, work: Work) -> None:
        """Run the work at once; what it raises is raised here."""
        self._ended.append((task, work(self._device)))

    def wait(self) -> tuple[str, Any]:
        """See `Executor.wait`."""
        return self._ended.popleft()
