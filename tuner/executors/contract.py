"""The contract of an executor: it runs tasks on one or more devices, one at a time on each.

A task is a trial, given by `tuner.search.trials`, or the training of a group of heads, given by `tuner.heads.distill`. An executor
runs the work that it is given and says how it ended. A trial measures its candidate and plain decoding on the same device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tuner.measuring.contract import Measuring
from tuner.measuring.disturbance import DisturbanceWatch


@dataclass(frozen=True)
class TrialDevice:
    """A device as a trial sees it."""

    bench: Measuring
    watch: DisturbanceWatch
    name: str | None = None
    """Name for records; None for the device of this process, which the search names anyway."""


DeviceT = TypeVar("DeviceT")
DeviceT_co = TypeVar("DeviceT_co", covariant=True)

Work = Callable[[DeviceT], Any]
"""Runs one task on a device. It is called again, on this or another device, if a device is lost."""


class DeviceLostError(Exception):
    """The device of a trial does not answer any more: its process was killed, or its host is away. The trial is to be redone."""


class RemoteTrialError(Exception):
    """A trial failed in another process. The message is the whole description, with the name of the error."""


class Executor(Protocol[DeviceT_co]):
    """Runs tasks on devices: `TrialDevice` for trials, `tuner.heads.group.GroupTrainer` for heads."""

    @property
    def num_devices(self) -> int:
        """Number of tasks that can run at a time, at least 1."""

    def submit(self, task: str, work: Work[DeviceT_co]) -> None:
        """Run the work on the next free device. May return before it has ended, or after.

        `task` names it, in messages too; no two tasks that run at a time have one name.
        """

    def wait(self) -> tuple[str, Any]:
        """Return the name and the result of a task that has ended, waiting for one if none has; each is returned once.

        Raises what the work raised. At least one task must have been submitted and not returned yet.
        """
