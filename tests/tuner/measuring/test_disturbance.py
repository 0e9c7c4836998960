"""What disturbed a device during a trial: other processes, and clocks that were lowered."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from tuner.errors import ConfigError
from tuner.measuring.disturbance import GpuWatch, ProcessorTimes, ProcessorWatch, watch_of


@pytest.mark.parametrize(
    ("busy", "own", "found"),
    [
        (20.0, 20.0, None),
        (20.9, 20.0, None),
        (25.0, 20.0, "other processes used 25% of the processors"),
        (10.0, 0.0, "other processes used 50% of the processors"),
    ],
)
def test_processors_are_disturbed_by_other_processes_only(busy: float, own: float, found: str | None) -> None:
    times = iter([ProcessorTimes(100.0, 50.0, 30.0), ProcessorTimes(110.0, 50.0 + busy, 30.0 + own)])
    watch = ProcessorWatch(lambda: next(times), cores=2)
    watch.begin()
    assert watch.found() == found


def test_the_real_times_of_this_process_are_no_more_than_those_of_all() -> None:
    watch = watch_of(torch.device("cpu"))
    watch.begin()
    sum(range(10**6))
    found = watch.found()
    assert found is None or found.startswith("other processes used")


class Nvml:
    """The part of NVML that is asked: processes on the GPU and reasons for lowered clocks, look by look."""

    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self, *looks: tuple[int, int]) -> None:
        self._looks = list(looks)
        self.asked: list[str] = []

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: str) -> list[object]:
        return [object()] * self._looks[0][0]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: str) -> int:
        return self._looks.pop(0)[1]


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ((1, 0), (1, 0), None),
        ((1, 0x4), (1, 0x1), None),  # a power cap and idleness are as usual
        ((1, 0x40), (1, 0), "the GPU's clocks were lowered by heat"),
        ((1, 0), (1, 0x80 | 0x20), "the GPU's clocks were lowered by heat and a power brake"),
    ],
)
def test_a_gpu_is_looked_at_before_and_after(
    before: tuple[int, int], after: tuple[int, int], found: str | None
) -> None:
    nvml = Nvml(before, after)
    watch = GpuWatch(nvml, "0123")
    watch.begin()
    assert watch.found() == found
    assert nvml.asked == ["GPU-0123"]


def test_a_second_process_on_the_gpu_is_found() -> None:
    watch = GpuWatch(Nvml((2, 0)), "GPU-0123")
    watch.begin()
    assert watch.found() == "2 processes were on the GPU"


def test_a_gpu_without_nvml_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigError, match="pip install nvidia-ml-py"):
        watch_of(SimpleNamespace(type="cuda"))  # type: ignore[arg-type]
