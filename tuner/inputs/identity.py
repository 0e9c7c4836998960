"""The identity of a loaded model, as profiles hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decoding.fingerprint import fingerprint, tokenizer_sha256
from decoding.profile import TargetIdentity

if TYPE_CHECKING:
    from decoding.target import Target
    from tuner.inputs.models import Loaded


def target_identity(loaded: Loaded, target: Target) -> TargetIdentity:
    """Return the identity of a loaded model, as a profile holds it."""
    model = fingerprint(loaded.model)
    return TargetIdentity(
        model=loaded.name,
        revision=loaded.revision,
        architecture=type(loaded.model).__name__,
        num_layers=target.num_layers,
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        config_sha256=model.config_sha256,
        weights_sha256=model.weights_sha256,
        tokenizer_sha256=tokenizer_sha256(loaded.tokenizer),
    )
