"""Short trials on devices: a device that measures nothing answers as a real one, and each trial is counted once."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from studies.measurement import Measurement
from tests.support.here_devices import HereDevices
from tuner.evaluation.executors import throughput
from tuner.evaluation.short_trials import PlantedBench, PlantedStudy
from tuner.executors.remote import RemoteBench
from tuner.progress import Unwatched


def measured(bench: Any, number: int) -> Measurement:
    trial: Any = SimpleNamespace(number=number)
    found: Measurement = bench.measure(PlantedStudy().propose(trial)[0], [0, 1])
    return found


def test_a_planted_device_measures_what_the_planted_bench_does() -> None:
    worker = throughput.PlantedWorker()
    assert worker.ask("begin", "", []) == {"lost": "its process was started again"}
    assert worker.ask("open") == {}
    assert measured(RemoteBench(worker.ask, range(4)), 7) == measured(PlantedBench(), 7)
    assert worker.ask("disturbance") == {"found": None}


def test_each_number_of_devices_runs_all_trials_once(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = HereDevices(monkeypatch)
    monkeypatch.setattr(throughput, "cluster_of", nullcontext)
    loads = throughput.device_loads(12, 3, Unwatched())
    assert [(each.devices, each.trials, each.wrong) for each in loads] == [(1, 12, 0), (2, 12, 0), (3, 12, 0)]
    assert devices.opened == ["planted 0", "planted 0", "planted 1", "planted 0", "planted 1", "planted 2"]
    assert all(1 <= each.used <= each.devices and each.trials_per_second > 0 for each in loads)
