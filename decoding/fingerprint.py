"""Which model this is: hashes of its configuration and of a strided sample of its weights, cheap even for 70B parameters.

The sample is rounded to bfloat16 before hashing, so a checkpoint loaded in float32 or in bfloat16 is the same model.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

SAMPLES_PER_TENSOR = 64

# Where the files lie, how they were loaded and which library wrote them does not change what the model computes.
VOLATILE_KEYS = frozenset(
    {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache", "architectures"}
)


@dataclass(frozen=True)
class Fingerprint:
    """The identity of a model, apart from its precision and device."""

    config_sha256: str
    weights_sha256: str


def fingerprint(model: PreTrainedModel) -> Fingerprint:
    """Hash the configuration, and the names, shapes and `SAMPLES_PER_TENSOR` evenly spaced values of each weight."""
    weights = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights.update(f"{name} {tuple(tensor.shape)}\n".encode())
        weights.update(_sample(tensor))
    return Fingerprint(
        config_sha256=hash_json(_lasting(model.config.to_diff_dict())), weights_sha256=weights.hexdigest()
    )


def _lasting(config: Any) -> Any:
    """The configuration without its volatile keys, those of the configurations inside it (text, vision) included."""
    if not isinstance(config, dict):
        return config
    return {key: _lasting(value) for key, value in config.items() if key not in VOLATILE_KEYS}


def tokenizer_sha256(tokenizer: Any) -> str:
    """Hash of the vocabulary and the special tokens."""
    return hash_json({"vocabulary": tokenizer.get_vocab(), "special": tokenizer.special_tokens_map})


def _sample(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    count = min(SAMPLES_PER_TENSOR, flat.numel())
    if count == 0 or flat.is_meta:
        return b""
    places = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64).long().to(flat.device)
    return flat[places].float().cpu().to(torch.bfloat16).view(torch.int16).numpy().tobytes()


def hash_json(value: Any) -> str:
    """SHA-256 of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
