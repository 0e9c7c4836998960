"""Layer dropout and the early exit of a training step, put around a model's blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tuner.evaluation.models.demo_model.recipe import Recipe


@dataclass(frozen=True)
class StepPlan:
    """Blocks that a step skips, and the block after which it also exits."""

    skipped: frozenset[int]
    exit_block: int


def plan_step(recipe: Recipe, step: int) -> StepPlan:
    """Draw the plan of `step` from seed and step alone."""
    generator = random.Random(f"{recipe.seed}:{step}")
    blocks = range(recipe.num_layers)
    skipped = frozenset(index for index in blocks if generator.random() < recipe.layer_dropout(index))
    first_exit = min(2, recipe.num_layers - 2)
    return StepPlan(skipped, generator.randrange(first_exit, recipe.num_layers - 1))


@dataclass
class LayerTap:
    """Interception of a model's blocks: skips the blocks of the plan and keeps the hidden state at the exit.

    Without a plan every block runs its own forward, uncompiled, so held-out losses are the plain model's.
    """

    plan: StepPlan | None = None
    exit_hidden: Tensor | None = None  # [batch, length, hidden]

    def around(self, index: int, plain: Callable[..., Tensor], trained: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the forward of block `index`, which calls `trained` under a plan and `plain` otherwise."""

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.plan is None:
                return plain(hidden_states, *args, **kwargs)
            if index not in self.plan.skipped:
                hidden_states = trained(hidden_states, *args, **kwargs)
            if index == self.plan.exit_block:
                self.exit_hidden = hidden_states
            return hidden_states

        return forward


@contextmanager
def tapped(layers: Sequence[nn.Module], compile_layers: bool = False) -> Iterator[LayerTap]:
    """Put one tap on all blocks; restore their own forwards when the context ends, also after an error."""
    tap = LayerTap()
    try:
        for index, layer in enumerate(layers):
            trained = torch.compile(layer.forward) if compile_layers else layer.forward
            layer.forward = tap.around(index, layer.forward, trained)
        yield tap
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)
