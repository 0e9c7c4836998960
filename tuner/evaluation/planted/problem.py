"""The planted problems: models with known redundancy, decoded for real and priced by a fixed table of costs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from decoding.draft_length import RoundCosts
from decoding.drafts import Draft, LayerSkip
from decoding.profile import Decoding
from decoding.target import Target
from decoding.text import Ending
from studies.costs.table import CostTable
from studies.costs.terms import DraftStep, Pass
from tuner.evaluation.planted.model import plant, prompts
from tuner.measuring.baseline import decode_baseline
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


@dataclass(frozen=True)
class PlantedProblem:
    """A planted model with a bench that charges the prices of `table` for every round."""

    seed: int
    target: Target
    table: CostTable
    bench: Bench

    @classmethod
    def of(cls, target: Target, seed: int) -> PlantedProblem:
        """Decode the prompts of this seed plainly and open the bench."""
        table = measure_cost_table(
            target, max_tokens=MAX_TOKENS, contexts=(PROMPT_LENGTH, PROMPT_LENGTH + NUM_TOKENS), timer=_timer(target)
        )
        baseline = decode_baseline(target, prompts(NUM_PROMPTS, PROMPT_LENGTH, seed), Ending(NUM_TOKENS))
        clock = PriceList.of_costs(_costs_of(table, target.num_layers))
        return cls(seed, target, table, Bench(target, baseline, decoding=DECODING, seed=seed, clock=clock))


def small_problem(seed: int) -> PlantedProblem:
    """Return the small problem: redundant and slightly redundant blocks lie between the first and the last one."""
    redundant, grey = _drawn_blocks(NUM_LAYERS, seed)
    target = Target(plant(NUM_LAYERS, redundant, redundant, grey_attention=grey, grey_mlp=grey, seed=seed))
    return PlantedProblem.of(target, seed)


def _drawn_blocks(num_layers: int, seed: int) -> tuple[list[int], list[int]]:
    inner = list(range(1, num_layers - 1))
    random.Random(f"blocks/{seed}").shuffle(inner)
    return sorted(inner[:NUM_REDUNDANT]), sorted(inner[NUM_REDUNDANT : NUM_REDUNDANT + NUM_GREY])


def _timer(target: Target) -> Timer:
    """Return made-up seconds of a pass: 1 for a plain one, less for skipped sublayers, more for further tokens."""
    whole = ENDS + 2 * target.num_layers

    def seconds(each: Pass) -> float:
        if isinstance(each, DraftStep):
            return 1.0 - (len(each.skip.skip_attention) + len(each.skip.skip_mlp)) / whole
        return 1.0 + WIDENING * (each.width - 1)

    return seconds


def _costs_of(table: CostTable, num_layers: int) -> Callable[[Draft], RoundCosts]:
    @cache
    def costs_of(draft: Draft) -> RoundCosts:
        part = draft.skipped(num_layers) if draft.runs_model else LayerSkip()
        return table.round_costs(part, MAX_TOKENS, context=CONTEXT, prefix_reuse=False)

    return costs_of
