"""The weights of a loaded model as passes were prepared for them: whether they have moved or changed since, and copies of them.

What is noticed of parameters and buffers: another address (`model.to`, an assigned state dict, a rebound tensor); a change in
place that torch counts (`load_state_dict`, an optimizer); and, where passes are recorded or weights were copied, other values at a
sample of each weight (an adapter merged by `weight.data += delta`, which torch does not count). Not noticed: a change in place
through `.data` that leaves the sample as it was, and what modules hold besides weights, such as a switch that turns an adapter off.
Rotary frequencies that depend on the sequence length are no weights: each pass computes its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from decoding.errors import UnsupportedModelError
from decoding.memory import is_plain

SAMPLE_BYTES = 32
"""Bytes of each tensor on the host that are compared, in its middle: read there, they cost a third of a microsecond."""
SAMPLE_SIZE = 8
"""Numbers of each matrix on another device that are compared, evenly spaced."""

LINE_BYTES = 64
"""Bytes of a line of a processor's caches, at whose multiples torch allocates memory."""

Make = Callable[[], nn.Module]
"""Makes a module that holds a copy of weights, from the weights as they are."""


class ModelWeights:
    """The weights of a model as they were when `note` was last called, and the modules that hold copies of them."""

    def __init__(self, model: nn.Module, *, frequencies_change: bool = False) -> None:
        modules = list(model.modules())
        # The name's end of buffers that passes of the model write themselves, and read where they are.
        self._written_by_passes = "inv_freq" if frequencies_change else None
        # The tables themselves: walking through the modules again for each sequence would take several times as long.
        self._children = [(each._modules, tuple(each._modules.values())) for each in modules if each._modules]
        self._tables = [table for each in modules for table in (each._parameters, each._buffers) if table]
        # In the order in which they were made, as one may be a copy of another. Weak: a copy ends with the views that run it.
        self._copies = WeakKeyDictionary[nn.Module, Make]()
        self._layout = [_layout_of(tensor) for tensor in self._tensors()]
        self.note()

    def copied(self, make: Make) -> nn.Module:
        """Return what `make` returns, and keep it up to date. `make` must not hold the module that it returns."""
        copy = make()
        self._copies[copy] = make
        return copy

    def are_as_noted(self, *, values: bool) -> bool:
        """Return whether nothing has moved or changed; `values` compares samples of the values even if there are no copies."""
        if self._read_places() != self._places or not self._has_its_modules():
            return False
        return not (values or self._copies) or self._read_sample() == self._sample

    def difference(self) -> str | None:
        """Return why what was prepared for the model cannot run it any more, or None."""
        if not self._has_its_modules():
            return "modules of the model were replaced"
        found = [_layout_of(tensor) for tensor in self._tensors()]
        if found == self._layout:
            return None
        if len(found) != len(self._layout):
            return f"the model had {len(self._layout)} parameters and buffers, and has {len(found)}"
        was, now = next(pair for pair in zip(self._layout, found, strict=True) if pair[0] != pair[1])
        return f"weights of the model were {_describe(was)}, and are {_describe(now)}"

    def renew(self) -> None:
        """Make the copies again in their modules. Raises `UnsupportedModelError` if there is a `difference`."""
        if (reason := self.difference()) is not None:
            raise UnsupportedModelError(f"{reason}: make a new target or decoder of it")
        for copy, make in list(self._copies.items()):
            _take_over(copy, make())

    def note(self) -> None:
        self._places = self._read_places()
        plain = [tensor for tensor in self._tensors() if is_plain(tensor) and tensor.is_contiguous() and tensor.numel()]
        self._pieces = [
            (tensor.data_ptr() + tensor.nbytes // 2, min(SAMPLE_BYTES, tensor.nbytes - tensor.nbytes // 2))
            for tensor in plain
            if tensor.device.type == "cpu"
        ]
        self._devices = {tensor.device for tensor in plain if tensor.device.type not in ("cpu", "meta")}
        self._sample = self._read_sample()

    def _tensors(self) -> Iterator[Tensor]:
        return (
            tensor
            for table in self._tables
            for name, tensor in table.items()
            if tensor is not None and not (self._written_by_passes and name.endswith(self._written_by_passes))
        )

    def _has_its_modules(self) -> bool:
        return all(tuple(table.values()) == known for table, known in self._children)

    def _read_places(self) -> list[tuple[int, int]]:
        """Return the address of each tensor and the changes that torch has counted; of a tensor without an address its identity."""
        return [
            (tensor.data_ptr() if is_plain(tensor) else id(tensor), 0 if tensor.is_inference() else tensor._version)
            for tensor in self._tensors()
        ]

    def _read_sample(self) -> list[Any]:
        """Return some values. Those on the host are read where they were noted: the places must be the same."""
        return [*(ctypes.string_at(*piece) for piece in self._pieces), *map(self._sample_on, self._devices)]

    def _sample_on(self, device: torch.device) -> list[int]:
        """Return the bytes of some values of each matrix on a device, in one transfer."""
        matrices = [tensor for tensor in self._tensors() if tensor.device == device and tensor.ndim > 1]
        with torch.inference_mode():
            parts = [
                tensor.as_strided((SAMPLE_SIZE,), (tensor.numel() // SAMPLE_SIZE,))
                for tensor in matrices
                if is_plain(tensor) and tensor.is_contiguous() and tensor.numel() >= SAMPLE_SIZE
            ]
            sample: list[int] = torch.cat(parts).view(torch.uint8).tolist() if parts else []
        return sample


def align_to_cache_lines(model: nn.Module) -> None:
    """Move tensors on the host that do not begin with a cache line to new memory, one at a time; tied ones stay tied.

    The file of a checkpoint is mapped, and lays its tensors anywhere. Vectors then lie across two lines: on SmolLM2 (AMD Zen 3, one
    thread) reading the weights takes 1.2 times as long for one position, and 1.4 times for six. Once all have moved, the file is
    not mapped any more; processes on one host do not share the weights then.
    """
    moved: dict[object, Tensor] = {}
    with torch.inference_mode(False), torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type != "cpu" or not is_plain(tensor) or tensor.is_inference():
                continue
            if tensor.data_ptr() % LINE_BYTES and tensor.is_contiguous():
                place = (tensor.data_ptr(), tensor.dtype, tensor.shape)
                if place not in moved:
                    moved[place] = tensor.detach().clone()
                tensor.data = moved[place]


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    is_strided = tensor.layout == torch.strided
    stride = tensor.stride() if is_strided else None
    return tensor.dtype, tensor.device, tensor.shape, stride, type(tensor), tensor.is_inference()


def _describe(layout: tuple[Any, ...]) -> str:
    dtype, device, shape, *_ = layout
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


def _take_over(module: nn.Module, other: nn.Module) -> None:
    """Let `module` hold what `other` holds. Its tables stay the same objects, as other modules may share them."""
    for name, value in vars(other).items():
        own = vars(module).get(name)
        if isinstance(own, dict):
            own.update(value)
        else:
            vars(module)[name] = value
