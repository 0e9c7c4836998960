"""Planted redundancy: random Llamas with known skippable sublayers, as search problems with a known answer.

Every attention and every MLP sublayer is of one of three kinds. *Redundant* ones add next to nothing to the residual stream: a
draft without all of them says almost always what the model says. *Important* ones add about as much as any other, within a
factor of three: skipping a single one costs agreement, an early or loud one most. *Grey* ones lie between: one of them costs some
per cent, several together far more. The construction is our
formulation; its constants were
tuned so that this holds for 12, 32 and 80 layers, with texts that do not fall into loops. What skipping saves is not modelled:
sublayers cost what they cost.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decoding.documents.atomic_write import write_atomically
from decoding.documents.strict_yaml import Document
from decoding.drafts import LayerSkip
from decoding.errors import SdtuneError

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


class PlantedError(SdtuneError):
    """A planted model that cannot be made or written as asked."""


class PlantedSets(Document):
    """Redundant and grey sublayers of a model; all others are important."""

    num_layers: int
    seed: int
    redundant: LayerSkip
    grey: LayerSkip

    @property
    def important(self) -> LayerSkip:
        """Sublayers that are neither redundant nor grey."""
        return _as_skip(_all_sublayers(self.num_layers) - _as_sublayers(self.redundant) - _as_sublayers(self.grey))


@dataclass(frozen=True)
class Planted:
    """A model and its planted sublayers. `redundant` is the skip set that a search should find."""

    model: PreTrainedModel
    sets: PlantedSets

    @property
    def redundant(self) -> LayerSkip:
        """The draft that skips every redundant sublayer."""
        return self.sets.redundant


def draw_sets(num_layers: int, *, seed: int, share: float = 0.45, grey_share: float = 0.1) -> PlantedSets:
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
    return PlantedSets(
        num_layers=num_layers,
        seed=seed,
        redundant=_as_skip(inner[:num_redundant]),
        grey=_as_skip(inner[num_redundant : num_redundant + num_grey]),
    )


def planted(num_layers: int, *, seed: int, share: float = 0.45) -> Planted:
    """Return a model whose redundant and grey sublayers are drawn by the seed."""
    sets = draw_sets(num_layers, seed=seed, share=share)
    model = plant(
        num_layers,
        sets.redundant.skip_attention,
        sets.redundant.skip_mlp,
        grey_attention=sets.grey.skip_attention,
        grey_mlp=sets.grey.skip_mlp,
        seed=seed,
    )
    return Planted(model, sets)


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


@torch.no_grad()
def agreement(model: PreTrainedModel, texts: Tensor, skip: LayerSkip, *, first: int = 1) -> float:
    """Return the share of tokens of `texts` [number, length], from `first` on, that the model without `skip` ranks highest.

    On texts that the model wrote greedily after prompts of length `first`, this is the acceptance rate of a draft, except that the
    draft reads its own keys and values: in decoding, verified tokens have the model's.
    """
    with silenced(model, skip):
        logits = model(texts, use_cache=False).logits[:, first - 1 : -1]
    return (logits.argmax(dim=-1) == texts[:, first:]).float().mean().item()


@contextmanager
def silenced(model: PreTrainedModel, skip: LayerSkip) -> Iterator[None]:
    """Let the sublayers of `skip` add nothing inside the context; the model is restored at its end."""

    def silence(module: nn.Module, inputs: object, output: Any) -> Any:
        return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)

    with ExitStack() as hooks:
        for kind, index in _as_sublayers(skip):
            hooks.callback(_module(model, kind, index).register_forward_hook(silence).remove)
        yield


def singles(skip: LayerSkip) -> Sequence[LayerSkip]:
    """Return the drafts that skip one of these sublayers each."""
    return [_as_skip([sublayer]) for sublayer in sorted(_as_sublayers(skip))]


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


def _as_sublayers(skip: LayerSkip) -> Sublayers:
    return _sublayers(skip.skip_attention, skip.skip_mlp)


def _as_skip(sublayers: Iterable[tuple[str, int]]) -> LayerSkip:
    chosen = sorted(sublayers)
    return LayerSkip(
        skip_attention=tuple(index for kind, index in chosen if kind == ATTENTION),
        skip_mlp=tuple(index for kind, index in chosen if kind == MLP),
    )


def write_planted(out: Path, num_layers: int, *, share: float, seed: int) -> Planted:
    """Write a planted model and `planted.json` into the new folder `out`, and return the problem.

    Raises `PlantedError` if `out` exists or cannot be written, or if the sets do not leave an important sublayer.
    """
    if out.exists():
        raise PlantedError(f"{out} exists; choose another --out")
    try:
        problem = planted(num_layers, seed=seed, share=share)
        problem.model.save_pretrained(out)
    except (ValueError, OSError) as cause:
        raise PlantedError(str(cause)) from None
    content = problem.sets.model_dump_json(indent=2).encode() + b"\n"
    write_atomically(out / "planted.json", content, what="the planted sets", error=PlantedError)
    return problem
