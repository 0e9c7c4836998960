"""A CUDA device without a GPU: tensors of `cuda:0` without values, and a list of the host's waits for them.

torch's fake tensors check devices and shapes as a GPU would. The few operations that reach for the CUDA driver even with
fake tensors are replaced here. Each operation that makes the host wait for the device is noted; a recorded pass must not
contain any.

A number that the host reads is 0, a truth value is true, a probability is 0.5: a round accepts no draft and goes on.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from decoding.runners.buckets import GPU_BUCKETS
from decoding.runners.graphs import OutputsT
from decoding.runners.static import StaticRunner
from decoding.target import Target

DEVICE = torch.device("cuda:0")
CAPABILITY = (9, 0)
"""That of an H100."""
PRODUCT = ("/decoding/", "/studies/", "/tuner/")
READS = {"item", "tolist", "numpy", "__int__", "__float__", "__bool__", "__index__"}
DATA_DEPENDENT = {"nonzero", "masked_select", "equal", "multinomial", "unique"}
aten = torch.ops.aten


@dataclass(frozen=True)
class Wait:
    """One wait of the host for the device."""

    reason: str
    place: str
    """The innermost line of the product, `file:line`."""


@dataclass
class FakeCuda:
    """The fake device, which is also a recorder of passes: a recording computes once and then plays the same outputs."""

    waits: list[Wait] = field(default_factory=list)
    waits_in_recordings: list[Wait] = field(default_factory=list)
    num_recorded: int = 0
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    _recording: bool = False

    def note(self, reason: str) -> None:
        """Note that the host waits for the device."""
        wait = Wait(reason, _place())
        self.waits.append(wait)
        if self._recording:
            self.waits_in_recordings.append(wait)

    def record(self, run: Callable[[], OutputsT]) -> tuple[OutputsT, Callable[[], OutputsT]]:
        """Run `run` as if a CUDA graph recorded it; see `PassRecorder.record`."""
        self.num_recorded += 1
        self._recording = True
        try:
            outputs = run()
        finally:
            self._recording = False
        return outputs.copied(), lambda: outputs.copied()

    def target(self, model: PreTrainedModel) -> Target:
        """Return `model` with its weights on the fake device, run by the static runner with this recorder."""
        runner = partial(StaticRunner, compiled=False, buckets=GPU_BUCKETS, recorder=self)
        return Target(moved(model, self.mode), runner)

    def waits_of(self, work: Callable[[], object]) -> Counter[str]:
        """Do the work and return how often the host waited at each place of the product."""
        first = len(self.waits)
        work()
        return Counter(wait.place for wait in self.waits[first:])


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Make `cuda:0` usable, without values, until the end of the block."""
    device = FakeCuda()
    with pytest.MonkeyPatch.context() as patch, device.mode, _Watched(device):
        patch.setattr(FakeTensor, "tolist", Tensor.tolist)  # its own reads the numbers one by one
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY)
        patch.setattr("decoding.target.target.check_runner", lambda target, eager: None)  # it compares values
        patch.setattr("decoding.target.soundness._check_window", lambda target: None)  # it demands different values
        yield device


def moved(model: PreTrainedModel, mode: FakeTensorMode) -> PreTrainedModel:
    """Move a model to the fake device; tensors that modules share stay shared."""
    done: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in done:
            fake = aten._to_copy(mode.from_tensor(tensor.detach()), device=DEVICE)
            is_parameter = isinstance(tensor, nn.Parameter)
            done[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
        return done[id(tensor)]

    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = move(tensor)  # type: ignore[assignment]
    return model


class _Watched(TorchFunctionMode):
    """Replaces what would call the CUDA driver, and notes what would wait for the device."""

    def __init__(self, device: FakeCuda) -> None:
        super().__init__()
        self._device = device
        self._replaced: dict[Any, Callable[..., Any]] = {
            Tensor.__getitem__: self._get,
            Tensor.__setitem__: self._set,
            Tensor.copy_: self._copy,
            Tensor.to: self._to,
            Tensor.contiguous: _contiguous,
            Tensor.data_ptr: _address,
            Tensor.__deepcopy__: _deep_copy,
            Tensor.pin_memory: _pinned,
            Tensor.is_pinned: is_pinned,
            torch.tensor: self._new,
            torch.zeros: _without_pinning(torch.zeros),
            torch.empty: _without_pinning(torch.empty),
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if args and isinstance(args[0], Tensor) and name in READS:
            return self._read(name, args[0])
        if args and isinstance(args[0], Tensor) and name in DATA_DEPENDENT and args[0].is_cuda:
            self._device.note(name)
            if name == "equal":
                return True
        if func in self._replaced:
            return self._replaced[func](*args, **kwargs)
        if name in ("cuda", "cpu") and isinstance(args[0], Tensor):
            return self._to(args[0], torch.device(name), **kwargs)
        return func(*args, **kwargs)

    def _read(self, name: str, tensor: Tensor) -> Any:
        if tensor.is_cuda:
            self._device.note(name)
        if name == "__bool__":
            return True
        value = 0.5 if tensor.dtype.is_floating_point else 0
        if name == "__float__":
            return float(value)
        return _nested(value, tensor.shape) if name == "tolist" else value

    def _new(self, data: Any, **settings: Any) -> Tensor:
        device, pinned = settings.pop("device", None), settings.pop("pin_memory", False)
        made = torch.tensor(data, **settings)
        if pinned:
            return _pinned(made)
        if device is None or torch.device(device).type != "cuda":
            return made
        self._device.note("torch.tensor")
        return aten._to_copy(made, device=DEVICE)

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wanted = [*args, *kwargs.values()]
        device = next((torch.device(each) for each in wanted if isinstance(each, str | torch.device)), None)
        if not tensor.is_cuda and (device is None or device.type != "cuda"):
            return tensor.to(*args, **kwargs)
        device = DEVICE if device is None or device.type == "cuda" else device
        dtype = next((each for each in wanted if isinstance(each, torch.dtype)), tensor.dtype)
        if device.type != tensor.device.type:
            self._copied(tensor.device, tensor, non_blocking=kwargs.get("non_blocking", False))
        elif dtype == tensor.dtype:
            return tensor
        return aten._to_copy(tensor, device=device, dtype=dtype)

    def _copy(self, into: Tensor, values: Tensor, non_blocking: bool = False) -> Tensor:
        if into.device.type != values.device.type:
            self._copied(values.device, values, non_blocking=non_blocking)
        return aten.copy_(into, values)

    def _copied(self, source: torch.device, values: Tensor, *, non_blocking: bool) -> None:
        """Note a copy between host and device unless it is a pinned copy that need not be awaited."""
        if source.type == "cuda" or not (non_blocking and is_pinned(values)):
            self._device.note("copy to the host" if source.type == "cuda" else "copy to the device")

    def _get(self, tensor: Tensor, index: Any) -> Tensor:
        if not tensor.is_cuda:
            return tensor[index]
        view, indices = self._view(tensor, index)
        chosen = next((each for each in indices if each is not None and each.dtype == torch.bool), None)
        if chosen is not None:  # as if one entry was chosen
            return view.new_empty((1, *view.shape[chosen.ndim :]))
        return aten.index(view, indices) if indices else view

    def _set(self, tensor: Tensor, index: Any, values: Any) -> None:
        if not tensor.is_cuda:
            tensor[index] = values
            return
        view, indices = self._view(tensor, index)
        if not isinstance(values, Tensor):
            values = aten.full([], values, dtype=tensor.dtype, device=DEVICE)
        elif not values.is_cuda and values.ndim:
            self._device.note("assignment of host values")
        if indices:
            aten.index_put_(view, indices, values)
        else:
            aten.copy_(view, values)

    def _view(self, tensor: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
        """Apply the part of an index that makes views; return the rest as tensors per dimension."""
        parts = _expanded(index if isinstance(index, tuple) else (index,), tensor.ndim)
        dim, indices = 0, dict[int, Tensor]()
        for part in parts:
            if part is None:
                tensor = aten.unsqueeze(tensor, dim)
            elif isinstance(part, slice):
                if part != slice(None):  # each operation on a fake tensor takes as long as hundreds of lines of Python
                    tensor = aten.slice(tensor, dim, part.start, part.stop, part.step or 1)
            elif isinstance(part, Tensor | list):
                indices[dim] = self._index(part)
                dim += indices[dim].ndim - 1 if indices[dim].dtype == torch.bool else 0
            else:
                tensor = aten.select(tensor, dim, int(part))
                continue
            dim += 1
        return tensor, [indices.get(each) for each in range(max(indices, default=-1) + 1)]

    def _index(self, part: Any) -> Tensor:
        index = part if isinstance(part, Tensor) else torch.tensor(part)
        if index.dtype == torch.bool:
            self._device.note("boolean index")
        elif not index.is_cuda and index.ndim:
            self._device.note("host index")
        return index


def _expanded(index: tuple[Any, ...], ndim: int) -> list[Any]:
    """Return the index with full slices in place of an ellipsis."""
    if not any(part is Ellipsis for part in index):
        return list(index)
    given = sum(
        part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1
        for part in index
        if part is not None and part is not Ellipsis
    )
    at = next(position for position, part in enumerate(index) if part is Ellipsis)
    return [*index[:at], *[slice(None)] * (ndim - given), *index[at + 1 :]]


def _address(tensor: Tensor) -> int:
    """Return a number that is the same for tensors at the same place in the same storage."""
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()


def _deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    copied = aten.clone(tensor.detach())
    memo[id(tensor)] = nn.Parameter(copied) if isinstance(tensor, nn.Parameter) else copied
    return memo[id(tensor)]


def _contiguous(tensor: Tensor, **kwargs: Any) -> Tensor:
    if not tensor.is_cuda:
        return tensor.contiguous(**kwargs)
    return tensor if tensor.is_contiguous() else aten.clone(tensor, memory_format=torch.contiguous_format)


def _without_pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a constructor that only marks tensors as pinned: pinning needs the driver."""

    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        return _pinned(tensor) if pin_memory else tensor

    return made


def _pinned(tensor: Tensor) -> Tensor:
    tensor.is_pinned_by_test = True  # type: ignore[attr-defined]
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    """Return True if the tensor, or the one it is a view of, was made in pinned memory."""
    owner = tensor if tensor._base is None else tensor._base
    return getattr(owner, "is_pinned_by_test", False)


def _nested(value: float, shape: torch.Size) -> Any:
    if not shape:
        return value
    return [_nested(value, shape[1:]) for _ in range(shape[0])]


def _place() -> str:
    """Return the innermost line of the product on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        root = next((root for root in PRODUCT if root in file), None)
        if root is not None and "/tests/" not in file:
            return f"{root[1:]}{file.rpartition(root)[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "tests"
