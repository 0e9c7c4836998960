"""Sizes of a model, known without its weights, and the memory of a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from decoding.errors import first_line
from decoding.memory import is_out_of_memory
from tuner.errors import MemoryShortageError
from tuner.inputs.checkpoint import readable, refuse_unusable
from tuner.inputs.model_folder import check_folder
from tuner.inputs.models import DTYPES, SPREAD, quiet, resolve_device

USABLE = 0.9
"""Share of the free memory that is planned with; the rest is for fragments and what an estimate leaves out."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes that decide how much memory a model and work with it take."""

    num_parameters: int
    block_parameters: int
    """Parameters of the last block, of which an exit head is a copy."""
    num_layers: int
    hidden_size: int
    vocabulary: int
    cache_values: int
    """Keys and values of one token in all layers."""
    dtype: torch.dtype

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * self.dtype.itemsize

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return self.cache_values * self.dtype.itemsize

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype | None = None) -> ModelSize:
        """Return the sizes of a model, which may be on the meta device, with weights in `dtype` (default: its own)."""
        config: Any = model.config.get_text_config()
        return cls(
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            block_parameters=_block_parameters(model, config.num_hidden_layers),
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocabulary=config.vocab_size,
            cache_values=cache_values(config),
            dtype=dtype or model.dtype,
        )


def cache_values(config: Any) -> int:
    """Return the number of values in the keys and values of one token, in all layers of a model with this configuration."""
    config = config.get_text_config()
    heads = getattr(config, "num_attention_heads", 0)  # a recurrent model, which the probe refuses, has none
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    return int(2 * config.num_hidden_layers * key_value_heads * head_size)


def size_of_checkpoint(
    name: str, *, revision: str | None = None, dtype: str = "auto", device: str = "auto"
) -> ModelSize:
    """Return the sizes that the model `name` will have when it is loaded with these settings; reads its config.json only.

    Raises `ConfigError` if there is no such model, if it is quantised, or if the device does not exist.
    """
    check_folder(name)
    on_cpu = resolve_device(device).type == "cpu"
    with quiet(), readable(name, "has no configuration of a causal language model"):
        refuse_unusable(name, revision)
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    stored = getattr(config.get_text_config(), "dtype", None) or torch.float32
    return ModelSize.of(model, DTYPES.get(dtype) or (torch.float32 if on_cpu else stored))


def free_bytes(device: str) -> int | None:
    """Return the free memory of a device, as settings name it, or None if it cannot be found out.

    Memory that torch holds without using it counts as free.
    """
    found = resolve_device(device)
    if found.type == "cuda":
        devices = range(torch.cuda.device_count()) if device == SPREAD else [found]
        return sum(_free_of_gpu(each) for each in devices)
    return _free_ram(Path("/sys/fs/cgroup")) if found.type == "cpu" else None


@contextmanager
def explained_shortage(what: str, remedy: str) -> Iterator[None]:
    """Turn running out of memory into a `MemoryShortageError` of one line: `what` was being done, and its `remedy`."""
    try:
        yield
    except (RuntimeError, MemoryError) as cause:
        if not is_out_of_memory(cause):
            raise
        raise MemoryShortageError(f"out of memory while {what}: {remedy} ({first_line(cause)})") from None


def refuse_too_large(size: ModelSize, free: int | None, name: str) -> None:
    """Raise `MemoryShortageError` if the weights of the model `name` alone exceed the `free` memory; None is unknown."""
    if free is not None and size.weight_bytes > free:
        raise MemoryShortageError(
            f"{name} does not fit: its weights take {gigabytes(size.weight_bytes)} in "
            f"{str(size.dtype).removeprefix('torch.')}, and {gigabytes(free)} are free on the device; give "
            "another device or dtype, or a smaller model"
        )


def gigabytes(num_bytes: float) -> str:
    """Return a number of bytes in GB, as the makers of devices count them."""
    return f"{num_bytes / 1e9:.2f} GB"


def _block_parameters(model: nn.Module, num_layers: int) -> int:
    """Return the parameters of the last block: of the largest list of `num_layers` modules."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == num_layers]
    return max((sum(weight.numel() for weight in each[-1].parameters()) for each in lists), default=0)


def _free_of_gpu(device: torch.device | int) -> int:
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def _free_ram(cgroup: Path) -> int:
    """Return the available RAM, within the limit of this process's container if it has one."""
    free = [psutil.virtual_memory().available]
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        free.append(max(0, int(most) - int(used.read_text())))
    return min(free)
