"""Many short trials of one study on several Ray devices: how many a second one search can hand out.

The trials measure nothing, so all that is timed is what a search does for a trial beside measuring it: choosing, sending each
sample's request to a device and reading its answer, storing. One process proposes and stores for all devices.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import optuna

from tuner.evaluation.executors.cluster import CLASS, cluster_of
from tuner.evaluation.short_trials import NUM_PROMPTS, PlantedBench, PlantedStudy
from tuner.executors import ray_cluster
from tuner.executors.pool import DevicePool
from tuner.executors.remote import trial_device
from tuner.executors.worker import Answer, DeviceWorker
from tuner.measuring.disturbance import NotWatched
from tuner.progress import Progress
from tuner.search.budget import Budget
from tuner.search.storage import StudyStore
from tuner.search.trial_run import DEVICE
from tuner.search.trials import run_study


class PlantedWorker(DeviceWorker):
    """A device whose bench answers at once."""

    def open(self, *_: object) -> Answer:
        """Load nothing."""
        self._bench, self._watch = PlantedBench(), NotWatched()
        return {}


@dataclass(frozen=True)
class DeviceLoad:
    """What one number of devices made of the trials."""

    devices: int
    trials: int
    seconds: float
    """From the moment that all devices were ready to the end of the last trial."""
    processor_seconds: float
    """Of the process that proposes, sends and stores."""
    used: int
    """Devices that ran a trial."""
    wrong: int
    """Trials lost or doubled."""

    @property
    def trials_per_second(self) -> float:
        """Trials of all devices together."""
        return self.trials / self.seconds

    def facts(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {**asdict(self), "trials_per_second": self.trials_per_second}


def device_loads(num_trials: int, most_devices: int, progress: Progress) -> list[DeviceLoad]:
    """Run `num_trials` trials on 1, 2, 4 ... `most_devices` devices of a cluster on this machine, each in a study of its own."""
    counts = sorted({most_devices, *(2**n for n in range(most_devices.bit_length()) if 2**n <= most_devices)})
    found = []
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with cluster_of(most_devices), TemporaryDirectory(prefix="sdtune-devices-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        for count in counts:
            progress.stage(f"{num_trials} short trials on {count} devices", num_trials)
            found.append(_loaded(count, num_trials, Path(folder), progress))
    return found


def _loaded(count: int, num_trials: int, folder: Path, progress: Progress) -> DeviceLoad:
    devices = ray_cluster.find_devices(CLASS, "cpu", most=count)
    reached = partial(trial_device, range(NUM_PROMPTS))
    connections = [
        ray_cluster.RayDevice(number, devices.reservation, PlantedWorker, (), reached, label=CLASS)
        for number in range(count)
    ]
    store, study = StudyStore(f"sqlite:///{folder / f'{count}.db'}", f"devices-{count}"), PlantedStudy()
    try:
        stored = store.open(study, {})
        with DevicePool(connections, progress.say, patience=600.0) as pool:
            start, before = time.perf_counter(), sum(os.times()[:2])
            records, _ = run_study(
                study, stored, pool, range(NUM_PROMPTS), Budget(num_trials, None), lambda record: progress.advance()
            )
            seconds, processor = time.perf_counter() - start, sum(os.times()[:2]) - before
    finally:
        store.close()
    numbers = Counter(record.number for record in records)
    wrong = sum(numbers[number] != 1 for number in range(num_trials)) + len(set(numbers) - set(range(num_trials)))
    used = {record.notes.get(DEVICE) for record in records}
    return DeviceLoad(count, len(records), seconds, processor, len(used), wrong)
