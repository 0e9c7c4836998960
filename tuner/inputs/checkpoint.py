"""A checkpoint before its weights are read: its configuration, and what refuses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from decoding.errors import SdtuneError, one_line
from decoding.fingerprint import configuration_sha256
from decoding.out_of_memory import is_out_of_memory
from tuner.errors import ConfigError

LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "aqlm": ("aqlm", "accelerate"),
    "awq": ("gptqmodel", "accelerate"),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed_tensors",),
    "fbgemm_fp8": ("fbgemm_gpu", "accelerate"),
    "fp8": ("accelerate",),
    "gptq": ("gptqmodel", "optimum"),
    "hqq": ("hqq", "accelerate"),
    "mxfp4": ("kernels", "accelerate"),
    "quanto": ("optimum.quanto", "accelerate"),
    "torchao": ("torchao",),
}
"""Packages that transformers loads the common kinds of quantised checkpoints with, by `quant_method`."""


@contextmanager
def readable(name: str, otherwise: str) -> Iterator[None]:
    """Turn every failure to read the model `name` into a `ConfigError` of one line; `otherwise` is for a name that is not a folder.

    A shortage of memory stays as it is.
    """
    try:
        yield
    except SdtuneError:
        raise
    # Each format of weights and each family raises its own errors; to the user they all mean that this model cannot be read.
    except Exception as cause:
        if is_out_of_memory(cause):
            raise
        reason = f"{type(cause).__name__}: {one_line(cause)[:200]}"
        if Path(name).exists():
            raise ConfigError(f"cannot load the model {name}: {reason}") from cause
        raise ConfigError(f"no such model: {name} {otherwise} ({reason})") from cause


def refuse_quantised(name: str, revision: str | None = None) -> None:
    """Raise `ConfigError` if the model `name` is quantised. Reads its config.json only; raises OSError without one.

    No kind of quantised weights has been run with sdtune: copies of layers, exit heads and fixed shapes all take weights to be
    ordinary tensors.
    """
    config, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    method = quantisation(config)
    if method is None:
        return
    missing = [package for package in LIBRARIES.get(method, ()) if not _is_installed(package)]
    needs = f" (not installed: {', '.join(missing)})" if missing else ""
    raise ConfigError(
        f"{name} is quantised ({method}), which has not been tried with sdtune{needs}: give the checkpoint that it was "
        "quantised from"
    )


def checkpoint_configuration(name: str, revision: str | None = None) -> str:
    """Return the hash of the configuration of the model `name`, before its weights are read.

    Raises `ConfigError` if there is no such model. A loaded model's configuration may differ, as its family may complete it.
    """
    with readable(name, "has no configuration of a causal language model"):
        return configuration_sha256(AutoConfig.from_pretrained(name, revision=revision))


def quantisation(config: Mapping[str, Any]) -> str | None:
    """Return the `quant_method` of a config.json, "unknown method" if it names none, or None for ordinary weights."""
    parts = (config, *(part for part in config.values() if isinstance(part, dict)))
    found = next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)
    if found is None:
        return None
    # Older bitsandbytes checkpoints do not name their method.
    is_unnamed_bitsandbytes = found.get("load_in_4bit") or found.get("load_in_8bit")
    return str(found.get("quant_method") or ("bitsandbytes" if is_unnamed_bitsandbytes else "unknown method"))


def _is_installed(package: str) -> bool:
    """Return True if a package, or a package inside another, can be imported."""
    outer, _, inner = package.partition(".")
    return find_spec(outer) is not None and (not inner or find_spec(package) is not None)
