"""The demo model's training state and one training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tuner.evaluation.models.demo_model.layer_dropout import LayerTap, plan_step
from tuner.evaluation.models.demo_model.recipe import Recipe, RecipeError


@dataclass
class TrainingRun:
    """State of a run, as in a checkpoint. Curve and report are derived from its losses."""

    model: Any
    optimizers: list[torch.optim.Optimizer]
    losses: list[tuple[float, float]] = field(default_factory=list)  # (last layer, exit) of every step, nats per token
    held_out: dict[int, float] = field(default_factory=dict)  # step -> nats per token
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return len(self.losses)


def new_model(recipe: Recipe) -> Any:
    """Return a freshly initialised model in float32; the caller's random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return LlamaForCausalLM(recipe.llama_config())


def load_model(folder: Path, recipe: Recipe) -> Any:
    """Return the model of a finished run in float32. Raises `RecipeError` for another architecture than the recipe's."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    wanted = recipe.llama_config()
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        found, expected = getattr(model.config, key), getattr(wanted, key)
        if found != expected:
            raise RecipeError(f"the model to continue has {key}={found}, the recipe {expected}")
    return model


def new_optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return Muon for the blocks' matrices and AdamW for embeddings and norms; each group keeps its `base_lr`."""
    named = list(model.named_parameters())
    matrices = [weight for name, weight in named if weight.ndim == 2 and ".layers." in name]
    rest = [weight for name, weight in named if not (weight.ndim == 2 and ".layers." in name)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=recipe.muon_rate, momentum=0.95, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(rest, lr=recipe.adamw_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


def next_token_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of targets [batch, length] given normed hidden states [batch, length, hidden]."""
    logits = F.linear(hidden, head)  # [batch, length, vocabulary]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train_step(
    run: TrainingRun, tap: LayerTap, recipe: Recipe, batch: Tensor, loss_of: Callable[..., Tensor] = next_token_loss
) -> None:
    """Run one step on token ids [batch, context + 1] and append its losses to the run's."""
    model, step = run.model, run.step
    tap.plan = plan_step(recipe, step)
    inputs, targets = batch[:, :-1], batch[:, 1:]
    with torch.autocast(batch.device.type, torch.bfloat16):
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
        assert tap.exit_hidden is not None
        exit_hidden = model.model.norm(tap.exit_hidden)
        loss = loss_of(hidden, model.lm_head.weight, targets)
        exit_loss = loss_of(exit_hidden, model.lm_head.weight, targets)
    (loss + recipe.exit_weight * exit_loss).backward()
    tap.plan = tap.exit_hidden = None
    nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_norm)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * recipe.rate_factor(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    run.losses.append((loss.item(), exit_loss.item()))
