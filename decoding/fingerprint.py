"""Model identity: hashes of the configuration and of a strided sample of the weights.

Hashing is cheap even at 70B parameters. The sample is rounded to bfloat16 first, so a checkpoint has the same
fingerprint in float32 and in bfloat16.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

SAMPLES_PER_TENSOR = 64

# The files' location, how they were loaded and the library that wrote them do not affect what the model computes.
VOLATILE_KEYS = frozenset(
    {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache", "architectures"}
)


@dataclass(frozen=True)
class Fingerprint:
    """The identity of a model, independent of precision and device."""

    config_sha256: str
    weights_sha256: str


def fingerprint(model: PreTrainedModel) -> Fingerprint:
    """Hash the configuration and each weight's name, shape and `SAMPLES_PER_TENSOR` evenly spaced values."""
    weights = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights.update(f"{name} {tuple(tensor.shape)}\n".encode())
        weights.update(_sample(tensor))
    return Fingerprint(config_sha256=configuration_sha256(model.config), weights_sha256=weights.hexdigest())


def configuration_sha256(config: PreTrainedConfig) -> str:
    """Return the hash of a configuration, without what does not affect the model's output."""
    return hash_json(_lasting(config.to_diff_dict()))


def _lasting(config: Any) -> Any:
    """Return the configuration, nested ones (text, vision) included, without volatile keys."""
    if not isinstance(config, dict):
        return config
    return {key: _lasting(value) for key, value in config.items() if key not in VOLATILE_KEYS}


def tokenizer_sha256(tokenizer: Any) -> str:
    """Return the hash of the vocabulary and the special tokens."""
    return hash_json({"vocabulary": tokenizer.get_vocab(), "special": tokenizer.special_tokens_map})


def _sample(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    count = min(SAMPLES_PER_TENSOR, flat.numel())
    if count == 0 or flat.is_meta:
        return b""
    indices = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64).long().to(flat.device)
    return flat[indices].float().cpu().to(torch.bfloat16).view(torch.int16).numpy().tobytes()


def hash_json(value: Any) -> str:
    """Return the SHA-256 of plain data, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
