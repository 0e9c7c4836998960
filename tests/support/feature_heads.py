"""Feature heads made without training."""

from __future__ import annotations

from pathlib import Path

import torch

from decoding.drafts import FeatureHeadDraft
from decoding.exit_heads import FEATURE_HEAD, FEATURE_SCHEMA, HeadFacts, save_head
from decoding.fingerprint import fingerprint
from decoding.target import DraftVocabulary, FeatureHead, Target
from decoding.target.heads import new_feature_head


def disturbed_feature_head(
    target: Target, vocabulary: DraftVocabulary | None = None, *, scale: float = 0.03
) -> FeatureHead:
    """Return a new head with random joining weights of this scale, which reads both its inputs."""
    head = new_feature_head(target, vocabulary)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in head.block.parameters():
            weight.add_(scale * torch.randn(weight.shape, generator=generator).to(weight.device))
    return head


def write_feature_head(target: Target, folder: Path, head: FeatureHead) -> FeatureHeadDraft:
    """Write `head` with facts of `target`, and return its draft."""
    model = fingerprint(target.model)
    facts = HeadFacts(
        schema=FEATURE_SCHEMA,
        exit_layer=target.num_layers,
        num_layers=target.num_layers,
        architecture=type(target.model).__name__,
        config_sha256=model.config_sha256,
        weights_sha256=model.weights_sha256,
    )
    return FeatureHeadDraft(head=FEATURE_HEAD, head_sha256=save_head(folder / FEATURE_HEAD, head, facts))
