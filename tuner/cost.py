"""Measures the cost table of a model on the device at hand: a few seconds, for foretelling the cost of any draft."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch

from decoding.round_costs import Clock
from decoding.target import Target
from studies.cost_fit import fit_costs
from studies.cost_plan import plan_passes
from studies.cost_table import CostTable
from studies.cost_terms import BlockKinds, Pass, Terms
from tuner.cost_bench import PassTimer

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17, 25, 33, 49)
"""Costs bend at the first few tokens and behind powers of two; in between, a straight line does."""
BUDGET_SECONDS = 3.0
FEWEST_SWEEPS, MOST_SWEEPS = 2, 24
"""The first pass of a shape may be slow, so that one sweep does not do; passes so long that two spend the budget are hardly
disturbed."""
GOOD_ERROR = 0.04
"""Median error on held-out passes above which the machine is taken to be disturbed, and measured for longer."""
PATIENCE = 2
"""How many times the fewest sweeps and the budget may be spent on that."""

Timer = Callable[[Pass], float]
"""Seconds of a pass, timed once."""


@torch.inference_mode()
def measure_cost_table(
    target: Target,
    *,
    max_tokens: int,
    contexts: Sequence[int],
    budget_seconds: float = BUDGET_SECONDS,
    seed: int = 0,
    clock: Clock = time.perf_counter,
    timer: Timer | None = None,
) -> CostTable:
    """Time the passes of `studies.cost_plan` for drafts of up to `max_tokens` tokens behind `contexts` tokens, and fit.

    Sweeps through all passes are repeated, at least `FEWEST_SWEEPS` times, until `budget_seconds` are spent, and up to `PATIENCE`
    times as long while held-out passes are not predicted well. The fastest pass of each kind counts: what is cold or disturbed
    takes longer, never less. `seed` draws what is left out, and the tokens; `clock` gives seconds; `timer` stands in for
    running the passes.

    ValueError if `max_tokens` or a context is below 1, no context is given, or the model's context has no room for two tokens.
    """
    terms = resolve_terms(target, max_tokens=max_tokens, contexts=contexts)
    fitted, held_out = plan_passes(terms, seed)
    start = clock()
    timer = timer or PassTimer(target, most_tokens=terms.widths[-1], seed=seed, clock=clock)
    least = dict.fromkeys([*fitted, *held_out], float("inf"))
    for patience in range(1, PATIENCE + 1):
        num_sweeps = 0
        while num_sweeps < FEWEST_SWEEPS or (clock() - start < patience * budget_seconds and num_sweeps < MOST_SWEEPS):
            for each in least:
                least[each] = min(least[each], timer(each))
            num_sweeps += 1
        table = fit_costs(terms, {each: least[each] for each in fitted}, {each: least[each] for each in held_out})
        if table.error.median <= GOOD_ERROR:
            break
    return table


def resolve_terms(target: Target, *, max_tokens: int, contexts: Iterable[int]) -> Terms:
    """What to measure for these: widths up to `max_tokens` + 1, and contexts that leave room for them.

    Where the model's context is short, the contexts give way to the widths, and these to the model's context.
    """
    contexts = sorted(set(contexts))
    if max_tokens < 1 or not contexts or contexts[0] < 1:
        raise ValueError(f"max_tokens and contexts must be at least 1, got {max_tokens} and {contexts}")
    widest, room = max_tokens + 1, target.context_length
    if room is not None:
        if room < 3:
            raise ValueError(f"the model's context of {room} tokens has no room for a draft")
        widest = min(widest, room - 1)
        contexts = sorted({min(context, room - widest) for context in contexts})
    widths = [*(width for width in WIDTHS if width < widest), widest]
    return Terms(BlockKinds.of(target), tuple(widths), tuple(contexts))
