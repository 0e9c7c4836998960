"""Where the trials of a search run: on the bench of this process, or on the devices of a Ray cluster that do what this one does."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

from tuner.executors.contract import Executor, TrialDevice, Work
from tuner.executors.local import LocalExecutor
from tuner.executors.pool import DevicePool
from tuner.executors.remote import trial_device
from tuner.executors.worker import DeviceSpec, DeviceWorker
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.search.deployment import RuledBench
from tuner.search.task import Task
from tuner.stage_clock import Stage


class TrialDevices:
    """The executor of all studies, opened by the first trial; see `Executor`. A context manager, which gives the devices back."""

    def __init__(self, task: Task, bench: Bench, progress: Progress) -> None:
        self._task, self._bench, self._progress = task, bench, progress
        self._open = ExitStack()
        self._executor: Executor[TrialDevice] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def num_devices(self) -> int:
        """Number of trials that can run at a time; see `Executor`."""
        return self._opened.num_devices

    def submit(self, task: str, work: Work[TrialDevice]) -> None:
        """Run the work of a trial; the first one opens the devices.

        Raises `ConfigError` if there is no cluster, or if one of its devices is not like the one of this process.
        """
        self._opened.submit(task, work)

    def wait(self) -> tuple[str, Any]:
        """Return the name and the result of a trial that has ended."""
        return self._opened.wait()

    @property
    def _opened(self) -> Executor[TrialDevice]:
        if self._executor is None:
            self._executor = self._local() if self._task.config.executor == "local" else self._on_ray()
        return self._executor

    @property
    def most_repeats(self) -> int:
        """Times that a disturbed trial is measured again: none in this process, whose disturbances are told at the end."""
        return 0 if self._task.config.executor == "local" else self._task.config.repeats

    def _local(self) -> Executor[TrialDevice]:
        deployment = self._task.deployment
        return LocalExecutor(self._bench if deployment is None else RuledBench(self._bench, deployment.rules))

    def _on_ray(self) -> Executor[TrialDevice]:
        from tuner.executors.ray_cluster import RayDevice, connect, find_devices

        config, spec = self._task.config, device_spec(self._task, self._bench)
        with self._task.budget.clock.stage(Stage.LOADING):
            connect(config.ray_address)
            found = find_devices(config.ray_label, spec.device_type, most=config.ray_devices)
            self._progress.stage(f"loading the model on {found.count} Ray device{'s' if found.count > 1 else ''}")
            arguments = [spec.model_dump_json(), self._task.prices]
            device = partial(trial_device, self._bench.indices)
            devices = [
                RayDevice(number, found.reservation, DeviceWorker, arguments, device, label=config.ray_label)
                for number in range(found.count)
            ]
            return self._open.enter_context(DevicePool(devices, self._progress.say))


def device_spec(task: Task, bench: Bench) -> DeviceSpec:
    """Return what another device must load and be, so that its trials can be compared with those of this process."""
    config, runner, baseline = task.config, task.target.runner, bench.baseline
    return DeviceSpec.of(
        config,
        task.target.model,
        task.model,
        runner=runner.name,
        exact_width=runner.exact_width,
        decoding=task.decoding,
        seed=config.seed,
        most_kept=bench.most_kept,
        heads=config.heads.resolve(),
        prompts=baseline.prompts,
        continuations=baseline.continuations,
        rows=baseline.rows,
        categories=baseline.categories,
        batch_size=baseline.batch_size,
        max_new_tokens=baseline.ending.max_new_tokens,
        eos_token_ids=baseline.ending.eos_token_ids,
    )
