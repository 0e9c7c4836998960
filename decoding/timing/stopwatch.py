"""Elapsed seconds of work on a device. A clock is read only once the device has finished the work queued on it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

ReadSeconds = Callable[[], float]
"""Seconds since any fixed moment."""


class Stopwatch:
    """Seconds of work on one device. Passes on an accelerator return before they are done, so each reading waits for the device."""

    def __init__(self, device: torch.device, clock: ReadSeconds = time.perf_counter) -> None:
        self._device = device
        self._clock = clock

    def now(self) -> float:
        """Wait for the device and read the clock, in seconds."""
        self.synchronize()
        return self._clock()

    def time(self, work: Callable[[], object]) -> float:
        """Run `work` and return the seconds that it took on host and device."""
        start = self.now()
        work()
        return self.now() - start

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work, so that it is not counted to what follows."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
