"""Loads a model and its tokenizer from a local folder or the hub, quietly, with errors in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tuner.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Loaded:
    """A model on its device, its tokenizer, and where they came from."""

    model: PreTrainedModel
    tokenizer: Any
    name: str
    revision: str | None


def load(name: str, *, revision: str | None = None, dtype: str = "auto", device: str = "auto") -> Loaded:
    """Load `name` (a folder or a hub id). `dtype` auto is float32 on a CPU and the checkpoint's own on an accelerator.

    Raises `ConfigError` if there is no such model, it is not a causal language model, or there is no such device.
    """
    place = resolve_device(device)
    if Path(name).exists() and not (Path(name) / "config.json").exists():
        raise ConfigError(f"{name} is no model: a folder with a config.json is needed, as `save_pretrained` writes it")
    wanted = DTYPES.get(dtype) or (torch.float32 if place.type == "cpu" else "auto")
    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
            model = AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype=wanted)
        except (OSError, ValueError, ImportError, KeyError) as cause:
            reason = str(cause).strip().split("\n")[0]
            raise ConfigError(
                f"no such model: {name} is neither a folder with a model nor to be had from the hub ({reason})"
            ) from None
    return Loaded(model.to(place).eval(), tokenizer, name, revision or getattr(model.config, "_commit_hash", None))


def resolve_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU. Raises `ConfigError` for a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as cause:
        raise ConfigError(
            f"no device {device!r} on this machine ({str(cause).splitlines()[0]}); try cpu, cuda or auto"
        ) from None
    return place


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end a text by the model's own generation settings."""
    eos = model.generation_config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and notes of transformers; its settings are put back."""
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
