"""The planted problems: models with known redundancy, decoded for real and priced by a fixed table of costs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import torch
from torch import nn
from transformers import PreTrainedModel

from decoding.draft_length import RoundCosts
from decoding.drafts import BitWidth, Draft, LayerSkip
from decoding.kernels.integers import PACKED
from decoding.profile import Decoding
from decoding.target import Target
from decoding.text import Ending
from studies.costs.table import CostTable
from studies.costs.terms import DraftStep, Pass
from tuner.evaluation.planted.model import plant, prompts
from tuner.measuring.baseline import Baseline, decode_baseline
from tuner.measuring.clock import PriceList
from tuner.measuring.cost_table import Timer, measure_cost_table
from tuner.measuring.paired import Bench

MAX_TOKENS = 4
NUM_LAYERS, NUM_REDUNDANT, NUM_GREY = 12, 4, 2
"""Blocks of the small problem."""
NUM_PROMPTS, PROMPT_LENGTH, NUM_TOKENS = 3, 16, 24
DECODING = Decoding(prefix_reuse=False)
CONTEXT = PROMPT_LENGTH + NUM_TOKENS / 2
ENDS, WIDENING = 2.0, 0.05
"""Cost of a pass beside its sublayers, in sublayers; cost of each further verified token, in passes."""
PRECISE_LAYERS, PRECISE_REDUNDANT, PRECISE_GREY = 10, 3, 2
"""Blocks of the problem with precisions: fewer, as every set of blocks is decoded in every precision."""
PRICES: Mapping[BitWidth, tuple[float, float]] = MappingProxyType({8: (0.5, 0.95), 4: (0.35, 0.6)})
"""Range of the cost of a draft step in each precision, over the same step with the model's own weights."""
GRID = 4
"""Bits of the grid on which the weights of every other problem lie: there drafts in 4 bits agree as those in 8 bits do."""


@dataclass(frozen=True)
class PlantedProblem:
    """A planted model with a bench that charges the prices of `table` for every round."""

    seed: int
    target: Target
    table: CostTable
    bench: Bench

    @property
    def bits(self) -> tuple[BitWidth, ...]:
        """Precisions of the drafts that have a price, beside the model's own."""
        return self.table.bits

    @classmethod
    def of(cls, target: Target, seed: int, prices: Mapping[BitWidth, float] = MappingProxyType({})) -> PlantedProblem:
        """Decode the prompts of this seed plainly and open the bench.

        `prices` are those of a draft step in each precision, over the same step with the model's own weights.
        """
        table = measure_cost_table(
            target,
            max_tokens=MAX_TOKENS,
            contexts=(PROMPT_LENGTH, PROMPT_LENGTH + NUM_TOKENS),
            bits=tuple(prices),
            timer=_timer(target, prices),
        )
        baseline = decode_baseline(target, prompts(NUM_PROMPTS, PROMPT_LENGTH, seed), Ending(NUM_TOKENS))
        return cls(seed, target, table, _bench(target, table, baseline, seed))

    def in_lockstep(self) -> Bench:
        """Return a bench of the same prompts as one batch: the same prices in less time, as sequences share passes.

        Prices are those of the rounds of each sequence, which are the same in a batch.
        """
        return _bench(self.target, self.table, replace(self.bench.baseline, batch_size=NUM_PROMPTS), self.seed)


def _bench(target: Target, table: CostTable, baseline: Baseline, seed: int) -> Bench:
    clock = PriceList.of_costs(_costs_of(table, target.num_layers))
    return Bench(target, baseline, decoding=DECODING, seed=seed, clock=clock)


def small_problem(seed: int) -> PlantedProblem:
    """Return the small problem: redundant and slightly redundant blocks lie between the first and the last one."""
    return PlantedProblem.of(Target(_planted_blocks(NUM_LAYERS, NUM_REDUNDANT, NUM_GREY, seed)), seed)


def precision_problem(seed: int) -> PlantedProblem:
    """Return a problem whose drafts may be in 8 or 4 bits, at prices drawn by the seed.

    How often quantised drafts agree is planted too. Weights of odd seeds lie on a grid of 4 bits, so that both precisions agree
    alike; those of even seeds do not, and 4 bits agree seldom.
    """
    model = _planted_blocks(PRECISE_LAYERS, PRECISE_REDUNDANT, PRECISE_GREY, seed)
    if seed % 2:
        put_on_grid(model)
    stream = random.Random(f"prices/{seed}")
    prices = {bits: round(stream.uniform(*ends), 3) for bits, ends in PRICES.items()}
    return PlantedProblem.of(Target(model), seed, prices)


@torch.no_grad()
def put_on_grid(model: PreTrainedModel) -> None:
    """Round the weights of all linear layers to those of a quantised draft of `GRID` bits."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            packed = PACKED[GRID](layer.weight)
            layer.weight.copy_(packed.integers(0, packed.num_outputs) * packed.scales[:, None])


def _planted_blocks(num_layers: int, num_redundant: int, num_grey: int, seed: int) -> PreTrainedModel:
    """Return a model with whole blocks that are redundant or grey, between the first and the last one."""
    inner = list(range(1, num_layers - 1))
    random.Random(f"blocks/{seed}").shuffle(inner)
    redundant, grey = sorted(inner[:num_redundant]), sorted(inner[num_redundant : num_redundant + num_grey])
    return plant(num_layers, redundant, redundant, grey_attention=grey, grey_mlp=grey, seed=seed)


def _timer(target: Target, prices: Mapping[BitWidth, float]) -> Timer:
    """Return made-up seconds of a pass: 1 for a plain one, less for skipped sublayers, more for further tokens."""
    whole = ENDS + 2 * target.num_layers

    def seconds(each: Pass) -> float:
        if isinstance(each, DraftStep):
            share = 1.0 - (len(each.skip.skip_attention) + len(each.skip.skip_mlp)) / whole
            return share if each.skip.bits is None else share * prices[each.skip.bits]
        return 1.0 + WIDENING * (each.width - 1)

    return seconds


def _costs_of(table: CostTable, num_layers: int) -> Callable[[Draft], RoundCosts]:
    @cache
    def costs_of(draft: Draft) -> RoundCosts:
        part = draft.skipped(num_layers) if draft.runs_model else LayerSkip()
        return table.round_costs(part, MAX_TOKENS, context=CONTEXT, prefix_reuse=False)

    return costs_of
