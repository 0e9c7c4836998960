"""A Llama of 8 billion parameters made of fake tensors, and the peak bytes of running it: nothing is allocated.

Fake tensors have shapes, data types and storages, but no values: a read on the host gets a made-up one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

GIB = 2**30
NUM_PARAMETERS = 8_030_261_248
"""Parameters of Llama-3.1-8B."""
TOKEN = 1
"""The token id that every read of a fake tensor gives."""


def llama_8b_config(num_layers: int = 32) -> LlamaConfig:
    """Return the shape of Llama-3.1-8B, or of its first layers."""
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


@contextmanager
def fake_8b(num_layers: int = 32) -> Iterator[LlamaForCausalLM]:
    """Give the model in bfloat16; inside the context every new tensor is fake."""
    with FakeTensorMode(allow_non_fake_inputs=True), _HostReads():
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = LlamaForCausalLM(llama_8b_config(num_layers))
        finally:
            torch.set_default_dtype(default)
        yield model.eval()


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are made inside its context: those that live, and the most that ever did.

    Weights of `model` do not count, though some operations return views of them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self.now = self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live or key in self._weights:
            return
        self._live[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._live.pop(key)


class _HostReads(TorchFunctionMode):
    """Gives made-up values where the host reads a fake tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = _READS.get(getattr(func, "__name__", ""))
        if read is not None and args and isinstance(args[0], FakeTensor):
            return read(args[0])
        if func is Tensor.__getitem__ and _is_mask(args[1]):
            return args[0].flatten(0, args[1].ndim - 1).clone()
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    """Return True for a fake boolean mask, all of whose elements count as true."""
    return isinstance(index, FakeTensor) and index.dtype == torch.bool


def _value(tensor: Tensor) -> float | int:
    return 0.5 if tensor.dtype.is_floating_point else TOKEN


def _nested(tensor: Tensor) -> Any:
    value: Any = _value(tensor)
    for size in reversed(tensor.shape):
        value = [value] * size
    return value


_READS: dict[str, Callable[[Tensor], Any]] = {
    "item": _value,
    "tolist": _nested,
    "equal": lambda tensor: True,
    "__bool__": lambda tensor: True,
    "__int__": lambda tensor: TOKEN,
    "__index__": lambda tensor: TOKEN,
    "__float__": lambda tensor: 0.5,
}
