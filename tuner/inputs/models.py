"""Loading of a model and its tokenizer from a local folder or the hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from decoding.errors import first_line
from tuner.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Loaded:
    """Model on its device, its tokenizer, and their source."""

    model: PreTrainedModel
    tokenizer: Any
    name: str
    revision: str | None


def load(name: str, *, revision: str | None = None, dtype: str = "auto", device: str = "auto") -> Loaded:
    """Load the model and tokenizer `name`, a folder or a hub id.

    `dtype` auto is float32 on a CPU and the checkpoint's own on an accelerator. Raises `ConfigError` if the model does not
    exist or is not a causal language model, or if the device does not exist.
    """
    torch_device = resolve_device(device)
    if Path(name).exists() and not (Path(name) / "config.json").exists():
        raise ConfigError(f"{name} is not a model folder: it has no config.json, which `save_pretrained` writes")
    wanted = DTYPES.get(dtype) or (torch.float32 if torch_device.type == "cpu" else "auto")
    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
            model = AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype=wanted)
        except (OSError, ValueError, ImportError, KeyError) as cause:
            reason = first_line(cause)
            raise ConfigError(
                f"no such model: {name} is neither a model folder nor available from the hub ({reason})"
            ) from None
    loaded_revision = revision or getattr(model.config, "_commit_hash", None)
    return Loaded(model.to(torch_device).eval(), tokenizer, name, loaded_revision)


def resolve_device(device: str) -> torch.device:
    """Return the torch device; `auto` is CUDA if available, otherwise the CPU.

    Raises `ConfigError` if the device does not exist.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as cause:
        raise ConfigError(
            f"no device {device!r} on this machine ({first_line(cause)}); try cpu, cuda or auto"
        ) from None
    return found


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the end-of-text token ids of the model's generation settings."""
    eos = model.generation_config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


@contextmanager
def quiet() -> Iterator[None]:
    """Turn off progress bars and log messages of transformers; restore them on exit."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
