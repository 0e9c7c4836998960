"""Groups of heads trained on the devices of a Ray cluster, one group at a time on each.

A device loads the model by itself, gets the texts once, and returns weights and figures; it writes no file. The group of a lost
device is trained again from its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import load, save

from decoding.errors import DistillationError, SdtuneError
from decoding.fingerprint import Fingerprint
from decoding.target import Target
from tuner.config import DistillSettings, SearchConfig
from tuner.executors.contract import DeviceLostError, Executor, RemoteTrialError
from tuner.executors.model_spec import ModelSpec
from tuner.executors.pool import DevicePool
from tuner.executors.remote import Ask
from tuner.heads.group import GroupData, GroupTrainer, TrainedGroup
from tuner.heads.kinds import Figures
from tuner.heads.texts import GeneratedText
from tuner.progress import Progress

MOST_LOST = 3
"""Lost devices after which a group is given up: it may be the cause."""

_FIGURES: TypeAdapter[dict[int, Figures]] = TypeAdapter(dict[int, Figures])


class HeadSpec(ModelSpec):
    """What a device must load, be and know for the groups of one distillation."""

    settings: DistillSettings
    seed: int
    texts: tuple[GeneratedText, ...]
    unseen: tuple[GeneratedText, ...]

    def data(self) -> GroupData:
        """Return what groups are trained on."""
        return GroupData(self.settings, self.seed, self.texts, self.unseen)


class HeadWorker:
    """The process of one device: trains the groups that it is asked for, one at a time."""

    def __init__(self) -> None:
        self._target: Target | None = None
        self._data: GroupData | None = None

    def ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Return the answer of a method; `lost` if this process took the place of the one that had opened the device."""
        if self._target is None and method != "open":
            return {"lost": "its process was started again"}
        answer: dict[str, Any] = getattr(self, method)(*arguments)
        return answer

    def open(self, spec: str) -> dict[str, Any]:
        """Load what the spec, a `HeadSpec` in JSON, names."""
        try:
            wanted = HeadSpec.model_validate_json(spec)
            self._target, self._data = Target(wanted.loaded().model), wanted.data()
        except SdtuneError as refusal:
            return {"error": str(refusal)}
        return {}

    def train(self, exits: Sequence[int], most_seconds: float | None) -> dict[str, Any]:
        """Return the `weights` of each head as bytes of safetensors, its figures, all losses and the seconds of training."""
        assert self._target is not None, "the device was opened"
        assert self._data is not None, "the device was opened"
        try:
            run = self._data.new_run(self._target, exits, most_seconds)
            self._data.train(run, self._target)
            trained = self._data.finished(run, self._target)
        except SdtuneError as refusal:
            return {"error": str(refusal)}
        weights = {layer: _bytes_of(head.block) for layer, head in trained.heads.items()}
        after = _FIGURES.dump_python(dict(trained.after), mode="json")
        losses = [dict(of_step) for of_step in trained.losses]
        return {"weights": weights, "after": after, "losses": losses, "seconds": trained.seconds}


def _bytes_of(block: torch.nn.Module) -> bytes:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in block.state_dict().items()}
    return save(tensors)


@dataclass
class RemoteTrainer:
    """The trainer of a device in another process; see `GroupTrainer`."""

    target: Target
    """Of this process; heads are made for it, and their weights replaced."""
    data: GroupData
    lost: dict[tuple[int, ...], int]
    """Number of devices that each group has lost, on all devices."""
    ask: Ask
    name: str

    def train(self, exits: Sequence[int], most_seconds: float | None) -> TrainedGroup:
        """See `GroupTrainer.train`."""
        try:
            answer = self.ask("train", list(exits), most_seconds)
        except RemoteTrialError as failure:
            raise DistillationError(f"{self.name}: {failure}") from None
        except DeviceLostError as lost:
            group = tuple(exits)
            self.lost[group] = self.lost.get(group, 0) + 1
            if self.lost[group] < MOST_LOST:
                raise
            raise DistillationError(
                f"{MOST_LOST} devices were lost while heads {', '.join(map(str, exits))} were trained, the last one: {lost}; "
                "finished heads stay"
            ) from None
        if "error" in answer:
            raise DistillationError(f"{self.name}: {answer['error']}")
        heads = {}
        for layer, head in self.data.new_heads(self.target, exits).items():
            block = head.block.to(torch.bfloat16).requires_grad_(False)
            block.load_state_dict(load(answer["weights"][layer]))
            heads[layer] = replace(head, block=block)
        return TrainedGroup(heads, _FIGURES.validate_python(answer["after"]), answer["losses"], answer["seconds"])


@dataclass(frozen=True)
class TrainingDevices:
    """The devices of a cluster that train heads."""

    config: SearchConfig
    count: int
    reservation: Mapping[str, Any]

    @classmethod
    def of(cls, config: SearchConfig, target: Target) -> TrainingDevices | None:
        """Return the devices of `config`, or None if heads are trained in this process. Raises `ConfigError` without a cluster."""
        if config.executor == "local":
            return None
        from tuner.executors.ray_cluster import connect, find_devices

        connect(config.ray_address)
        found = find_devices(config.ray_label, target.device.type, most=config.ray_devices)
        return cls(config, found.count, found.reservation)

    @contextmanager
    def open(
        self, target: Target, model: Fingerprint, data: GroupData, progress: Progress
    ) -> Iterator[Executor[GroupTrainer]]:
        """Yield the devices with the model loaded; they are given back at the end.

        Raises `ConfigError` for a device that is not like that of this process.
        """
        from tuner.executors.ray_cluster import RayDevice

        config = self.config
        spec = HeadSpec.of(
            config,
            target.model,
            model,
            settings=data.settings,
            seed=data.seed,
            texts=tuple(data.texts),
            unseen=tuple(data.unseen),
        )
        device = partial(RemoteTrainer, target, data, {})
        arguments = [spec.model_dump_json()]
        progress.stage(f"loading the model on {self.count} Ray device{'s' if self.count > 1 else ''}")
        devices = [
            RayDevice(number, self.reservation, HeadWorker, arguments, device, label=config.ray_label)
            for number in range(self.count)
        ]
        with DevicePool(devices, progress.say) as pool:
            yield pool
