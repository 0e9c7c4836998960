"""Exit heads made without training: copies of a target's last block."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from decoding.drafts import EarlyExit
from decoding.exit_heads import ExitFigures, HeadFacts, HeadTraining, head_name, new_exit_head, save_head
from decoding.fingerprint import fingerprint
from decoding.target import Target


def training(**facts: Any) -> HeadTraining:
    """Return the training facts of a head."""
    figures = ExitFigures(acceptance=0.5, agreement=0.5)
    values: dict[str, Any] = {
        "model": "m",
        "dataset": "d",
        "prompts_sha256": (),
        "num_texts": 8,
        "num_tokens": 100,
        "temperature": 1.0,
        "steps": 10,
        "seconds": 20.0,
        "before": figures,
        "after": figures,
        "device": "a device",
        "versions": {},
    }
    return HeadTraining(**{**values, **facts})


def write_heads(target: Target, folder: Path, exit_layers: Iterable[int], **facts: Any) -> dict[int, EarlyExit]:
    """Write a copy of the last block as the head of each exit, with `facts`, and return the drafts by exit layer."""
    folder.mkdir(parents=True, exist_ok=True)
    model = fingerprint(target.model)
    drafts = {}
    for exit_layer in exit_layers:
        values: dict[str, Any] = {
            "exit_layer": exit_layer,
            "num_layers": target.num_layers,
            "architecture": type(target.model).__name__,
            "config_sha256": model.config_sha256,
            "weights_sha256": model.weights_sha256,
        }
        name = head_name(exit_layer)
        sha256 = save_head(folder / name, new_exit_head(target), HeadFacts(**{**values, **facts}))
        drafts[exit_layer] = EarlyExit(exit_layer=exit_layer, head=name, head_sha256=sha256)
    return drafts


def untrained_head(target: Target, seed: int = 0) -> nn.Module:
    """Return a disturbed copy of the last block, whose drafts are accepted sometimes but not always."""
    head = new_exit_head(target)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator) * weight.abs().mean())
    return head
