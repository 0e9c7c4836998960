"""A checkpoint before its weights are read: its configuration, and what refuses it."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import cached_file

from decoding.errors import SdtuneError, one_line
from decoding.fingerprint import configuration_sha256
from decoding.memory import is_out_of_memory
from tuner.errors import ConfigError

MOST_SIZES = (
    (re.compile(r"layers?$"), 1000),
    (re.compile(r"(hidden|intermediate|vocab|inner|head|embed\w*|ffn|state)_(size|dim)$"), 2**26),
    (re.compile(r"_heads$|_experts$|^d_model$|^n_embd$"), 2**26),
)
"""Greatest values of a config.json, by the names of its keys."""
MOST_GROWTH = 1000


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


def refuse_unusable(name: str, revision: str | None = None) -> None:
    """Raise `ConfigError` if the model `name` cannot be built or is quantised.

    Reads its config.json; raises OSError without one. No kind of quantised weights has been run with sdtune: copies of layers, exit
    heads and fixed shapes all take weights to be ordinary tensors.
    """
    config, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    _refuse_absurd_sizes(name, config)
    if (method := quantisation(config)) is not None:
        raise ConfigError(
            f"{name} is quantised ({method}), which has not been tried with sdtune: give the checkpoint that it was quantised from"
        )


def _refuse_absurd_sizes(name: str, config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for sizes that no model has: one with a thousand million layers would be built for hours."""
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        for key, value in part.items():
            most = next((most for words, most in MOST_SIZES if words.search(str(key))), None)
            if most is not None and isinstance(value, int | float) and value > most:
                raise ConfigError(
                    f"{name} is no model that can be loaded: its config.json has {key} {reprlib.repr(value)}, above {most:,}"
                )


def refuse_growing_text(name: str, revision: str | None = None) -> None:
    """Raise `ConfigError` for a tokenizer whose replacements make texts many times longer, until the memory is full."""
    path = cached_file(name, "tokenizer.json", revision=revision, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return
    content = json.loads(Path(path).read_bytes())
    for part in ("normalizer", "decoder"):
        if (growth := _growth(content.get(part))) > MOST_GROWTH:
            raise ConfigError(f"the tokenizer of {name} makes texts up to {growth:.0e} times longer by its {part}")


def _growth(part: Any) -> float:
    """Return how many times longer the replacements of a part of a tokenizer can make a text."""
    if isinstance(part, list):
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1.0
    pattern = part.get("pattern")
    replaced = len(pattern.get("String") or "") if isinstance(pattern, dict) else 0
    own = max(1.0, len(str(part.get("content") or "")) / max(1, replaced))
    return own * math.prod(_growth(each) for each in part.values() if isinstance(each, list))


def checkpoint_configuration(name: str, revision: str | None = None) -> str:
    """Return the hash of the configuration of the model `name`, before its weights are read.

    Raises `ConfigError` if there is no such model. A loaded model's configuration may differ, as its family may complete it.
    """
    with readable(name, "has no configuration of a causal language model"):
        refuse_unusable(name, revision)
        return configuration_sha256(AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False))


def quantisation(config: Mapping[str, Any]) -> str | None:
    """Return the `quant_method` of a config.json, "unknown method" if it names none, or None for ordinary weights."""
    parts = (config, *(part for part in config.values() if isinstance(part, dict)))
    found = next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)
    if found is None:
        return None
    # Older bitsandbytes checkpoints do not name their method.
    is_unnamed_bitsandbytes = found.get("load_in_4bit") or found.get("load_in_8bit")
    return str(found.get("quant_method") or ("bitsandbytes" if is_unnamed_bitsandbytes else "unknown method"))
