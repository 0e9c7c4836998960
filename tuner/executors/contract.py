"""The contract of an executor: it measures the trials of a study on one or more devices, one trial at a time on each.

Called by `tuner.search.trials`, which proposes candidates, writes records and tells the study. An executor runs the work that it is
given and says how it ended. A trial measures its candidate and plain decoding on the same device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tuner.measuring.contract import Measuring
from tuner.measuring.disturbance import DisturbanceWatch


@dataclass(frozen=True)
class TrialDevice:
    """A device as a trial sees it."""

    bench: Measuring
    watch: DisturbanceWatch
    name: str | None = None
    """Name for records; None for the device of this process, which the search names anyway."""


Work = Callable[[TrialDevice], Any]
"""Measures one trial on a device. It is called again, on this or another device, if a device is lost."""


class DeviceLostError(Exception):
    """The device of a trial does not answer any more: its process was killed, or its host is away. The trial is to be redone."""


class RemoteTrialError(Exception):
    """A trial failed in another process. The message is the whole description, with the name of the error."""


class Executor(Protocol):
    """Runs trials on devices."""

    @property
    def num_devices(self) -> int:
        """Number of trials that can run at a time, at least 1."""

    def submit(self, number: int, work: Work) -> None:
        """Run the work of the trial `number` on the next free device. May return before it has ended, or after."""

    def wait(self) -> tuple[int, Any]:
        """Return the number and the result of a trial that has ended, waiting for one if none has; each is returned once.

        Raises what the work raised. At least one trial must have been submitted and not returned yet.
        """
