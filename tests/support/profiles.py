"""Profiles for models on disk, without a search."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel

from decoding.draft_length import DraftLengthRule, Fixed
from decoding.drafts import Draft, LayerSkip
from decoding.fingerprint import fingerprint
from decoding.profile import (
    DatasetFacts,
    DraftProfile,
    Exactness,
    Interval,
    Measured,
    Rates,
    SearchCost,
    TargetIdentity,
)


def measured(device: str = "cpu (1 thread)", versions: dict[str, str] | None = None) -> Measured:
    """Return figures that were measured on this device with these versions."""
    return Measured(
        speedup=Interval(value=1.5, ci95=(1.4, 1.6)),
        tokens_per_second=Rates(draft=15, plain=10),
        draft_acceptance_rate=0.5,
        tokens_per_round=2,
        exact=Exactness(prompts=8, identical=8),
        search=SearchCost(trials=3, seconds=10),
        device=device,
        versions=versions or {},
        dataset=DatasetFacts(
            name="prompts.jsonl", fingerprint="f", tuning_prompts=8, held_out_prompts=8, max_new_tokens=24
        ),
    )


def profile_of(
    model: PreTrainedModel,
    draft: Draft | None = None,
    rule: DraftLengthRule | None = None,
    *,
    dtype: str = "float32",
    device: str | None = None,
    figures: Measured | None = None,
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
            device=device,
            config_sha256=found.config_sha256,
            weights_sha256=found.weights_sha256,
        ),
        draft=draft or LayerSkip(skip_attention=(2, 3, 4), skip_mlp=(3, 4)),
        draft_length=rule or Fixed(max_tokens=4),
        measured=figures,
    )


def save_profile(path: Path, model: str | Path, draft: Draft) -> Path:
    """Write a profile of `draft` for the model in the folder `model`, and return its path."""
    target = profile_of(AutoModelForCausalLM.from_pretrained(model), draft).target.model_copy(
        update={"model": str(model)}
    )
    DraftProfile(name="written by a test", target=target, draft=draft).save(path)
    return path
