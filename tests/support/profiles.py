"""Profiles for models on disk, without a search."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel

from decoding.draft_length import DraftLengthRule, Fixed
from decoding.drafts import Draft, LayerSkip
from decoding.fingerprint import fingerprint
from decoding.profile import DraftProfile, TargetIdentity


def profile_of(
    model: PreTrainedModel, draft: Draft | None = None, rule: DraftLengthRule | None = None, *, dtype: str = "float32"
) -> DraftProfile:
    """Return a profile for a loaded model of six layers, by default with a skip set and drafts of four tokens."""
    found = fingerprint(model)
    return DraftProfile(
        name="tiny",
        target=TargetIdentity(
            model="tiny",
            architecture=type(model).__name__,
            num_layers=model.config.get_text_config().num_hidden_layers,
            dtype=dtype,
            config_sha256=found.config_sha256,
            weights_sha256=found.weights_sha256,
        ),
        draft=draft or LayerSkip(skip_attention=(2, 3, 4), skip_mlp=(3, 4)),
        draft_length=rule or Fixed(max_tokens=4),
    )


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
