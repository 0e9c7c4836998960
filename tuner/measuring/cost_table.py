"""Measures the cost table of a model on the device at hand: a few seconds, for foretelling the cost of any draft."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from decoding.target import Target
from decoding.timing.stopwatch import Clock
from studies.costs.fit import fit_costs
from studies.costs.plan import plan_passes
from studies.costs.table import CostTable
from studies.costs.terms import BlockKinds, Pass, Terms, Verification
from tuner.measuring.pass_timer import PassTimer

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17, 25, 33, 49)
"""Costs bend at the first few tokens and behind powers of two; in between, a straight line does."""
BUDGET_SECONDS = 3.0
FEWEST_SWEEPS, MOST_SWEEPS = 2, 24
"""The first pass of a shape may be slow, so that one sweep does not do; passes so long that two spend the budget are hardly
disturbed."""
GOOD_ERROR = 0.04
"""Median error on held-out passes above which the machine is taken to be disturbed, and measured for longer."""
BESIDE_PLAIN = 2
"""Passes between two plain ones."""
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
    num_texts: int = 1,
    budget_seconds: float = BUDGET_SECONDS,
    seed: int = 0,
    clock: Clock = time.perf_counter,
    timer: Timer | None = None,
) -> CostTable:
    """Time the passes of `studies.costs.plan` for drafts of up to `max_tokens` tokens behind `contexts` tokens, and fit.

    Sweeps through all passes are repeated, at least `FEWEST_SWEEPS` times, until `budget_seconds` are spent, and up to `PATIENCE`
    times as long while held-out passes are not predicted well. A plain pass is timed before and behind every two, and the median
    of a pass's ratios to those beside it counts: a shared machine is slower for seconds on end, by half as much again where
    memory is the limit, and what all take alike then would else be taken for a difference. `seed` draws what is left out, and
    the tokens; `clock` gives seconds; `timer` stands in for running the passes. With `num_texts` above 1 passes are those of so
    many texts in step, each behind as many tokens; the target must be one whose texts can share passes.

    ValueError if `max_tokens` or a context is below 1, no context is given, or the model's context has no room for two tokens.
    """
    terms = resolve_terms(target, max_tokens=max_tokens, contexts=contexts)
    fitted, held_out = plan_passes(terms, seed)
    start = clock()
    timer = timer or PassTimer(target, most_tokens=terms.widths[-1], num_texts=num_texts, seed=seed, clock=clock)
    times = _Times(timer, plain=Verification(1, terms.contexts[0]), passes=[*fitted, *held_out])
    for patience in range(1, PATIENCE + 1):
        num_sweeps = 0
        while num_sweeps < FEWEST_SWEEPS or (clock() - start < patience * budget_seconds and num_sweeps < MOST_SWEEPS):
            times.sweep()
            num_sweeps += 1
        table = fit_costs(terms, times.seconds(fitted), times.seconds(held_out))
        if table.error.median <= GOOD_ERROR:
            break
    return table


class _Times:
    """What passes take, each in turn with plain ones."""

    def __init__(self, timer: Timer, plain: Pass, passes: Sequence[Pass]) -> None:
        self._timer, self._plain = timer, plain
        self._ratios: dict[Pass, list[float]] = {each: [] for each in passes}
        self._plain_seconds: list[float] = []

    def sweep(self) -> None:
        """Time all of them once."""
        passes = list(self._ratios)
        before = self._timer(self._plain)
        for start in range(0, len(passes), BESIDE_PLAIN):
            taken = {each: self._timer(each) for each in passes[start : start + BESIDE_PLAIN]}
            behind = self._timer(self._plain)
            for each, seconds in taken.items():
                self._ratios[each].append(2 * seconds / (before + behind))
            self._plain_seconds.append(before := behind)

    def seconds(self, passes: Iterable[Pass]) -> dict[Pass, float]:
        """Of each: the median of its ratios to plain passes beside it, times what plain passes took."""
        plain = float(np.median(self._plain_seconds))
        return {each: plain * float(np.median(self._ratios[each])) for each in passes}


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
