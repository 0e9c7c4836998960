"""Whether other work disturbed a device while a trial was measured: what is asked before and after the trial.

A device that Ray or another scheduler has reserved may still be used by processes that know nothing of the reservation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tuner.errors import ConfigError
from tuner.measuring.machine import QUIET_SHARE

NVML_PACKAGE = "nvidia-ml-py"


class DisturbanceWatch(Protocol):
    """Watches a device during a trial."""

    def begin(self) -> None:
        """Look before a trial."""

    def found(self) -> str | None:
        """Look after it; return what disturbed the device since `begin`, in words, or None."""


class NotWatched:
    """A device that is not watched."""

    def begin(self) -> None:
        """Do nothing."""

    def found(self) -> str | None:
        """Return None."""
        return None


@dataclass(frozen=True)
class ProcessorTimes:
    """Seconds since fixed moments."""

    wall: float
    busy: float
    """Of all processors together: seconds in which they ran something."""
    own: float
    """Of all processors together: seconds in which they ran this process."""


class ProcessorWatch:
    """Watches the processors: other processes may use `QUIET_SHARE` of them.

    Processor time between the two looks is used, not the load average: that is a mean over a minute, which counts this process too,
    and would still be high when the trial is repeated.
    """

    def __init__(self, read: Callable[[], ProcessorTimes] | None = None, *, cores: int | None = None) -> None:
        self._read = read or _read_times
        self._cores = cores or os.cpu_count() or 1
        self._before: ProcessorTimes | None = None

    def begin(self) -> None:
        """Note the times."""
        self._before = self._read()

    def found(self) -> str | None:
        """Return the share of the processors that other processes have used, if it is too large."""
        assert self._before is not None, "a watch begins before it finds something"
        now, before = self._read(), self._before
        available = (now.wall - before.wall) * self._cores
        if available <= 0:
            return None
        share = ((now.busy - before.busy) - (now.own - before.own)) / available
        return f"other processes used {share:.0%} of the processors" if share > QUIET_SHARE else None


class GpuWatch:
    """Watches an NVIDIA GPU through NVML: other processes on it, and clocks that heat or power have lowered."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        """`nvml` is the module `pynvml`; `uuid` is the GPU's, as torch gives it."""
        nvml.nvmlInit()
        self._nvml = nvml
        self._gpu = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        self._before: str | None = None

    def begin(self) -> None:
        """Look once."""
        self._before = self._look()

    def found(self) -> str | None:
        """Return what the look before or the look after has seen."""
        return self._before or self._look()

    def _look(self) -> str | None:
        # In a container NVML gives the numbers of the host's processes, so this process is counted, not recognised.
        count = len(self._nvml.nvmlDeviceGetComputeRunningProcesses(self._gpu))
        if count > 1:
            return f"{count} processes were on the GPU"
        reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._gpu)
        slowed = {
            "heat": self._nvml.nvmlClocksThrottleReasonSwThermalSlowdown
            | self._nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
            "a power brake": self._nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        }
        found = [cause for cause, bits in slowed.items() if reasons & bits]
        return f"the GPU's clocks were lowered by {' and '.join(found)}" if found else None


def watch_of(device: torch.device) -> DisturbanceWatch:
    """Return the watch of a device. Raises `ConfigError` if NVML's package is missing on a machine with a GPU."""
    if device.type != "cuda":
        return ProcessorWatch()
    try:
        import pynvml
    except ImportError:
        raise ConfigError(
            f"a GPU is watched through NVML, whose package is missing: pip install {NVML_PACKAGE}"
        ) from None
    return GpuWatch(pynvml, str(torch.cuda.get_device_properties(device).uuid))


def _read_times() -> ProcessorTimes:
    import psutil

    whole, own = psutil.cpu_times(), psutil.Process().cpu_times()
    idle = whole.idle + getattr(whole, "iowait", 0.0)
    # Linux counts the time of guests in that of users too.
    guests = getattr(whole, "guest", 0.0) + getattr(whole, "guest_nice", 0.0)
    return ProcessorTimes(time.monotonic(), sum(whole) - guests - idle, own.user + own.system)
