"""Cost tables for tests: made-up seconds for a tiny model, and properties that hold for every table."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from itertools import pairwise

from decoding.drafts import BitWidth, LayerSkip
from decoding.target import Target
from studies.costs.table import CostTable
from studies.costs.terms import DraftStep, Pass
from tuner.measuring.cost_table import measure_cost_table

SHARES = {None: 1.0, 8: 0.4, 4: 0.25}
"""Seconds of a draft step in each precision, relative to the model's own weights."""


def made_up_costs(
    target: Target, max_tokens: int = 8, bits: Collection[BitWidth] = (), *, lm_head: float = 0.0
) -> CostTable:
    """Return costs of 1 s for embedding and logits, 1 s per sublayer, and 5 % more per further verified token.

    Draft steps in the precisions `bits` take `SHARES` of that. The LM head is the share `lm_head` of a step of the whole model.
    """
    of_lm_head = lm_head * (1.0 + 2 * target.num_layers)

    def seconds(each: Pass) -> float:
        if isinstance(each, DraftStep):
            skipped = len(each.skip.skip_attention) + len(each.skip.skip_mlp)
            below = each.skip.ids_below
            left_out = 0.0 if below is None else 1.0 - below / target.config.vocab_size
            return SHARES[each.skip.bits] * (1.0 + 2 * target.num_layers - skipped - of_lm_head * left_out)
        further = each.width - 1
        return 1.0 + 2 * target.num_layers + 0.05 * further * (1 + 2 * (target.num_layers - each.boundary))

    return measure_cost_table(
        target, max_tokens=max_tokens, contexts=(4, 64), bits=bits, budget_seconds=0.0, timer=seconds
    )


def assert_monotone(table: CostTable, *, max_tokens: int = 8) -> None:
    """Assert that skipping more never costs more, and verifying more tokens or after a longer context never costs less."""
    layers = range(table.kinds.num_layers)
    items = [LayerSkip.blocks((index,)) for index in layers]
    items += [LayerSkip(skip_mlp=(index,)) for index in layers if table.kinds.mlp[index] is not None]
    items += [LayerSkip(skip_attention=(index,)) for index in layers if table.kinds.attention[index] is not None]
    random.Random(0).shuffle(items)
    attention, mlp = set[int](), set[int]()
    seconds = [table.draft_seconds(LayerSkip(), context=70)]
    for item in items:
        attention |= {*item.skip_attention}
        mlp |= {*item.skip_mlp}
        skip = LayerSkip(skip_attention=tuple(sorted(attention)), skip_mlp=tuple(sorted(mlp)))
        seconds.append(table.draft_seconds(skip, context=70))
    _assert_rising(seconds[::-1])
    for context in (10, 70, 500):
        _assert_rising(table.round_costs(items[0], max_tokens, context=context, prefix_reuse=True).verify)
    _assert_rising([table.plain_seconds(context=context) for context in (10, 70, 500)])
    assert seconds[0] > 0


def _assert_rising(values: Sequence[float]) -> None:
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(values)), values
