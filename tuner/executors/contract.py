"""The contract of an executor: it measures the trials of studies on one or more devices, one trial at a time on each.

Called by `tuner.search.trials`, which proposes candidates, writes records and tells the studies. An executor runs the work that it
is given and says how it ended. A trial measures its candidate and plain decoding on the same device.
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

    def submit(self, task: str, work: Work) -> None:
        """Run the work on the next free device. May return before it has ended, or after.

        `task` names it, in messages too; no two tasks that run at a time have one name.
        """

    def wait(self) -> tuple[str, Any]:
        """Return the name and the result of a task that has ended, waiting for one if none has; each is returned once.

        Raises what the work raised. At least one task must have been submitted and not returned yet.
        """
