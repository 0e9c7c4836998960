"""Profiles for models on disk, without a search."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM

from decoding.drafts import Draft
from decoding.fingerprint import fingerprint
from decoding.profile import DraftProfile, TargetIdentity


def save_profile(path: Path, model: str | Path, draft: Draft) -> Path:
    """Write a profile of `draft` for the model in the folder `model`, and return its path."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    identity = fingerprint(loaded)
    target = TargetIdentity(
        model=str(model),
        architecture=type(loaded).__name__,
        num_layers=loaded.config.num_hidden_layers,
        dtype="float32",
        config_sha256=identity.config_sha256,
        weights_sha256=identity.weights_sha256,
    )
    DraftProfile(name="written by a test", target=target, draft=draft).save(path)
    return path
