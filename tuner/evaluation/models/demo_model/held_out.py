"""The loss of a model on the held-out files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tuner.evaluation.models.demo_model.corpus import windows
from tuner.evaluation.models.demo_model.recipe import RecipeError


@dataclass(frozen=True)
class HeldOutLoss:
    """Loss on all full, non-overlapping windows of the held-out text."""

    context: int  # tokens
    num_tokens: int
    nats_per_token: float
    bits_per_byte: float


@torch.no_grad()
def held_out_loss(model: Any, tokenizer: Any, tokens: Tensor, context: int, batch_size: int = 4) -> HeldOutLoss:
    """Evaluate `model` on the held-out token ids [length] in its own precision.

    The windows depend on the context only. A window's targets are its inputs shifted by one, so each token but the first is
    predicted once. Raises `RecipeError` for less than one window.
    """
    starts = range(0, len(tokens) - context, context)
    if not starts:
        raise RecipeError(f"the held-out text has {len(tokens)} tokens, fewer than one window of {context + 1}")
    byte_counts = token_bytes(tokenizer)
    was_training, nats, num_tokens, num_bytes = model.training, 0.0, 0, 0
    model.eval()
    for first in range(0, len(starts), batch_size):
        batch = windows(tokens, starts[first : first + batch_size], context)
        targets = batch[:, 1:]
        logits = model(input_ids=batch[:, :-1].to(model.device), use_cache=False).logits.float()
        nats += F.cross_entropy(logits.flatten(0, 1), targets.flatten().to(model.device), reduction="sum").item()
        num_tokens += targets.numel()
        num_bytes += int(byte_counts[targets].sum())
    model.train(was_training)
    return HeldOutLoss(context, num_tokens, nats / num_tokens, nats / math.log(2) / num_bytes)


def token_bytes(tokenizer: Any) -> Tensor:
    """Return the bytes of text per token of a byte-level BPE [vocabulary]; its alphabet has one character per byte."""
    special = set(tokenizer.all_special_ids)
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return torch.tensor([0 if index in special else len(name) for index, name in enumerate(names)])
