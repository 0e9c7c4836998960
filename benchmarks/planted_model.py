"""Planted redundancy: random Llamas with known skippable sublayers, as search problems with a known answer.

Every attention and every MLP sublayer is of one of three kinds. *Redundant* ones add next to nothing to the residual stream: a
draft without all of them says almost always what the model says. *Important* ones add about as much as any other, within a
factor of three: skipping a single one costs agreement, an early or loud one most. *Grey* ones lie between: one of them costs some
per cent, several together far more. The construction is our formulation; its constants were tuned so that this holds for 12,
32 and 80 layers, with sequences that do not fall into loops. What skipping saves is not modelled: sublayers cost what they cost.
"""

from __future__ import annotations

import json
import math
import random
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
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
    grey: LayerSkip


def draw_sets(
    num_layers: int, *, seed: int, share: float = 0.45, grey_share: float = 0.1
) -> tuple[LayerSkip, LayerSkip]:
    """Draw redundant sublayers (a `share` of all) and grey ones, outside the first and the last block.

    Published searches never skip these two blocks. Raises ValueError unless another important sublayer remains.
    """
    inner = sorted(_all_sublayers(num_layers) - _in_blocks({0, num_layers - 1}))
    num_redundant, num_grey = round(share * 2 * num_layers), max(2, round(grey_share * 2 * num_layers))
    if num_redundant < 1 or num_grey < 0 or num_redundant + num_grey >= len(inner):
        raise ValueError(
            f"{num_redundant} redundant and {num_grey} grey sublayers do not leave an important one among the {len(inner)} between "
            f"the first and the last of {num_layers} blocks"
        )
    random.Random(f"sets/{seed}").shuffle(inner)
    return _as_skip(inner[:num_redundant]), _as_skip(inner[num_redundant : num_redundant + num_grey])


def planted(num_layers: int, *, seed: int, share: float = 0.45) -> Planted:
    """Return a model whose redundant and grey sublayers are drawn by the seed."""
    redundant, grey = draw_sets(num_layers, seed=seed, share=share)
    model = plant(
        num_layers,
        redundant.skip_attention,
        redundant.skip_mlp,
        grey_attention=grey.skip_attention,
        grey_mlp=grey.skip_mlp,
        seed=seed,
    )
    return Planted(model, redundant, grey)


def plant(
    num_layers: int,
    redundant_attention: Iterable[int],
    redundant_mlp: Iterable[int],
    *,
    seed: int,
    grey_attention: Iterable[int] = (),
    grey_mlp: Iterable[int] = (),
    hidden_size: int = HIDDEN_SIZE,
    vocabulary_size: int = VOCABULARY_SIZE,
) -> PreTrainedModel:
    """Return a random Llama in float32 with these redundant and grey sublayers, and without an end-of-text token.

    Raises ValueError if a sublayer has both kinds or does not exist, or if none is left to be important.
    """
    redundant = _sublayers(redundant_attention, redundant_mlp)
    grey = _sublayers(grey_attention, grey_mlp)
    everything = _all_sublayers(num_layers)
    if not redundant | grey < everything:
        raise ValueError(
            f"redundant and grey sublayers must be some, but not all, sublayers of blocks 0 to {num_layers - 1}; got: "
            f"{_as_skip(redundant | grey).describe()}"
        )
    if redundant & grey:
        raise ValueError(f"{len(redundant & grey)} sublayers are both redundant and grey")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _random_llama(num_layers, hidden_size, vocabulary_size)
        _set_loudness(model, _loudness(num_layers, redundant, grey, seed))
    return model


def prompts(num: int, length: int, seed: int, vocabulary_size: int = VOCABULARY_SIZE) -> list[tuple[int, ...]]:
    """Return `num` prompts of `length` random tokens."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(vocabulary_size, (num, length), generator=generator)
    return [tuple(prompt) for prompt in drawn.tolist()]


def _random_llama(num_layers: int, hidden_size: int, vocabulary_size: int) -> Any:
    """Return a Llama with norm-preserving weights, sharp attention, and logits that are neither flat nor certain."""
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    gains = {"embed_tokens": EMBEDDING * math.sqrt(num_layers * hidden_size), "q_proj": SHARPNESS, "lm_head": LOGITS}
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


def _sublayers(attention: Iterable[int], mlp: Iterable[int]) -> Sublayers:
    return frozenset({(ATTENTION, index) for index in attention} | {(MLP, index) for index in mlp})


def _in_blocks(blocks: Iterable[int]) -> Sublayers:
    indices = tuple(blocks)
    return _sublayers(indices, indices)


def _all_sublayers(num_layers: int) -> Sublayers:
    return _in_blocks(range(num_layers))


def _as_skip(sublayers: Iterable[tuple[str, int]]) -> LayerSkip:
    chosen = sorted(sublayers)
    return LayerSkip(
        skip_attention=tuple(index for kind, index in chosen if kind == ATTENTION),
        skip_mlp=tuple(index for kind, index in chosen if kind == MLP),
    )


def main() -> None:
    parser = ArgumentParser(description="Write a planted model and its sets, planted.json, into a new folder.")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--share", type=float, default=0.45, help="of the sublayers that are redundant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    found = planted(args.layers, seed=args.seed, share=args.share)
    found.model.save_pretrained(args.out)
    sets = {name: getattr(found, name).model_dump(mode="json") for name in ("redundant", "grey")}
    (args.out / "planted.json").write_text(json.dumps({"seed": args.seed, **sets}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
