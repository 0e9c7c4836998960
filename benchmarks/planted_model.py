"""Planted redundancy: random Llamas with known skippable sublayers, as search problems with a known answer.

Every attention and every MLP sublayer is of one of three kinds. *Redundant* ones add next to nothing to the residual stream: a
draft without all of them says almost always what the model says. *Important* ones add about as much as any other, within a
factor of three: skipping a single one costs agreement, an early or loud one most. *Grey* ones lie between: one of them costs some
per cent, several together far more. The construction is our formulation; its constants were tuned so that this holds for 12,
32 and 80 layers, with sequences that do not fall into loops. What skipping saves is not modelled: sublayers cost what they cost.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decoding.drafts import LayerSkip

VOCABULARY_SIZE = 256
HIDDEN_SIZE = 64

# How much each kind adds, as root mean square. Important: against the embedding's EMBEDDING * sqrt(layers), which keeps the first
# sublayers from deciding everything. The others: relative to the residual stream before them; redundant ones all together.
EMBEDDING = 0.55
IMPORTANT = (0.6, 1.6)
GREY = (0.03, 0.06)
REDUNDANT = 0.006
# Queries are sharp, so that attention picks tokens instead of averaging them: the texts depend on more than the last token.
SHARPNESS = 3.0
LOGITS = 2.5  # standard deviation: about 3 of the 5.5 nats that 256 equally likely tokens have

ATTENTION, MLP = "attention", "mlp"
Sublayers = frozenset[tuple[str, int]]
"""Kind and block of each sublayer."""


class Planted(NamedTuple):
    """A model and its planted sublayers; all that are neither redundant nor grey are important."""

    model: PreTrainedModel
    redundant: LayerSkip
    """The skip set that a search should find."""


def planted(num_layers: int, *, seed: int) -> Planted:
    """Return a model whose redundant and grey sublayers are drawn by the seed: 45 % and 10 % of all, and at least 2.

    None is in the first or the last block, which published searches never skip.
    """
    inner = sorted(in_blocks(range(1, num_layers - 1)))
    num_redundant, num_grey = round(0.45 * 2 * num_layers), max(2, round(0.1 * 2 * num_layers))
    random.Random(f"sets/{seed}").shuffle(inner)
    redundant, grey = inner[:num_redundant], inner[num_redundant : num_redundant + num_grey]
    model = plant(num_layers, frozenset(redundant), frozenset(grey), seed=seed)
    return Planted(model, as_skip(redundant))


def plant(num_layers: int, redundant: Sublayers, grey: Sublayers, *, seed: int) -> PreTrainedModel:
    """Return a random Llama in float32 with these redundant and grey sublayers, and without an end-of-text token."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _random_llama(num_layers)
        _set_loudness(model, _loudness(num_layers, redundant, grey, seed))
    return model


def prompts(num: int, length: int, seed: int) -> list[tuple[int, ...]]:
    """Return `num` prompts of `length` random tokens."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(VOCABULARY_SIZE, (num, length), generator=generator)
    return [tuple(prompt) for prompt in drawn.tolist()]


def _random_llama(num_layers: int) -> Any:
    """Return a Llama with norm-preserving weights, sharp attention, and logits that are neither flat nor certain."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    gains = {"embed_tokens": EMBEDDING * math.sqrt(num_layers * HIDDEN_SIZE), "q_proj": SHARPNESS, "lm_head": LOGITS}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                gain = gains.get(name.split(".")[-2], 1.0)
                weight.normal_(std=gain * weight.shape[1] ** -0.5)
    return model


def _loudness(num_layers: int, redundant: Sublayers, grey: Sublayers, seed: int) -> dict[tuple[str, int], float]:
    """Return the root mean square that each sublayer adds to the residual stream, in order."""
    generator = random.Random(f"loudness/{seed}")
    power = EMBEDDING**2 * num_layers  # of the stream: independent additions add up in power
    loudness = {}
    for index in range(num_layers):
        # What is added early is amplified by what follows: less of it does the same.
        depth = 0.4 + 0.8 * index / num_layers
        for kind in (ATTENTION, MLP):
            here = (kind, index)
            drawn = generator.random()
            if here in redundant:
                loudness[here] = REDUNDANT / math.sqrt(len(redundant)) * depth * math.sqrt(power)
            elif here in grey:
                loudness[here] = _between(GREY, drawn) * depth * math.sqrt(power)
            else:
                loudness[here] = _between(IMPORTANT, drawn)
            power += loudness[here] ** 2
    return loudness


def _between(bounds: tuple[float, float], share: float) -> float:
    """Interpolate geometrically between the bounds: the lower at `share` 0, the upper at 1."""
    return bounds[0] * (bounds[1] / bounds[0]) ** share


@torch.no_grad()
def _set_loudness(model: Any, loudness: dict[tuple[str, int], float]) -> None:
    """Scale the last matrix of each sublayer in one pass over random tokens, in order, so that each sees scaled inputs."""

    def scale(last: nn.Linear, wanted: float) -> Callable[..., Any]:
        def hook(module: nn.Module, inputs: object, output: Any) -> Any:
            added = output[0] if isinstance(output, tuple) else output
            factor = wanted / added.square().mean().sqrt()
            last.weight.mul_(factor)
            return (added * factor, *output[1:]) if isinstance(output, tuple) else added * factor

        return hook

    with ExitStack() as hooks:
        for (kind, index), wanted in loudness.items():
            module = _module(model, kind, index)
            last = module.o_proj if kind == ATTENTION else module.down_proj
            hooks.callback(module.register_forward_hook(scale(last, wanted)).remove)
        model(torch.randint(model.config.vocab_size, (4, 64)), use_cache=False)


def _module(model: Any, kind: str, index: int) -> Any:
    block = model.model.layers[index]
    return block.self_attn if kind == ATTENTION else block.mlp


def in_blocks(blocks: Iterable[int]) -> Sublayers:
    """Return both sublayers of these blocks."""
    return frozenset((kind, index) for index in blocks for kind in (ATTENTION, MLP))


def as_skip(sublayers: Iterable[tuple[str, int]]) -> LayerSkip:
    """Return the draft that skips these sublayers."""
    chosen = sorted(sublayers)
    return LayerSkip(
        skip_attention=tuple(index for kind, index in chosen if kind == ATTENTION),
        skip_mlp=tuple(index for kind, index in chosen if kind == MLP),
    )
