"""A table of costs for tiny models, fitted to passes whose seconds are made up."""

from __future__ import annotations

from decoding.target import Target
from studies.cost_table import CostTable
from studies.cost_terms import DraftStep, Pass
from tuner.cost import measure_cost_table


def made_up_costs(target: Target, max_tokens: int = 8) -> CostTable:
    """One second for the ends of a pass and one for each sublayer; a twentieth more for each further token of a verification."""

    def seconds(each: Pass) -> float:
        if isinstance(each, DraftStep):
            skipped = len(each.skip.skip_attention) + len(each.skip.skip_mlp)
            return 1.0 + 2 * target.num_layers - skipped
        further = each.width - 1
        return 1.0 + 2 * target.num_layers + 0.05 * further * (1 + 2 * (target.num_layers - each.boundary))

    return measure_cost_table(target, max_tokens=max_tokens, contexts=(4, 64), budget_seconds=0.0, timer=seconds)
