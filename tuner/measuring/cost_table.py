"""Measures the cost table of a model on the current device, in a few seconds, to predict the cost of any draft."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import torch

from decoding.drafts import BitWidth
from decoding.target import Target
from decoding.timing.stopwatch import ReadSeconds
from studies.costs.fit import fit_costs
from studies.costs.plan import plan_passes
from studies.costs.table import CostTable
from studies.costs.terms import BlockKinds, Pass, Terms, Verification, join_share
from tuner.measuring.pass_timer import PassTimer

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17, 25, 33, 49)
"""Widths to measure: costs bend at the first few tokens and after powers of two, and are linear in between."""
BUDGET_SECONDS = 3.0
FEWEST_SWEEPS, MOST_SWEEPS = 2, 24
"""Limits on the number of sweeps. The first pass of a shape may be slow, so one sweep is too few; passes long enough to spend the
budget in two sweeps are hardly disturbed."""
GOOD_ERROR = 0.04
"""Median error on held-out passes above which the machine counts as disturbed and is measured for longer."""
BESIDE_PLAIN = 2
"""Number of passes between two plain ones."""
PATIENCE = 2
"""Number of times that the fewest sweeps and the budget may be spent on a disturbed machine."""

Timer = Callable[[Pass], float]
"""Returns the seconds of a pass, timed once."""


@torch.inference_mode()
def measure_cost_table(
    target: Target,
    *,
    max_tokens: int,
    contexts: Sequence[int],
    num_sequences: int = 1,
    bits: Collection[BitWidth] = (),
    budget_seconds: float = BUDGET_SECONDS,
    most_seconds: float = math.inf,
    seed: int = 0,
    clock: ReadSeconds = time.perf_counter,
    timer: Timer | None = None,
) -> CostTable:
    """Time the passes of `studies.costs.plan` for drafts of up to `max_tokens` tokens after `contexts` tokens, and fit the costs.

    Sweeps through all passes are repeated, at least `FEWEST_SWEEPS` times, until `budget_seconds` are spent, and up to `PATIENCE`
    times as long while held-out passes are predicted badly and fewer than `most_seconds` are spent. A plain pass is timed before
    and after every two passes, and the median of a pass's ratios to its plain neighbours counts: a shared machine is slower for
    seconds at a time, by half where memory is the limit, and slow periods must not look like differences between passes.

    `bits` are the precisions in which quantised drafts are timed too. `seed` draws held-out passes and tokens; `clock` gives
    seconds; `timer` replaces running the passes. With `num_sequences` above 1 every pass runs that many sequences in
    lockstep, each after the same number of tokens; the target must be able to share passes.

    Raises ValueError if `max_tokens` or a context is below 1, no context is given, or the model's context has no room for two
    tokens.
    """
    terms = resolve_terms(target, max_tokens=max_tokens, contexts=contexts, bits=bits)
    fitted, held_out = plan_passes(terms, seed)
    start = clock()
    own = PassTimer(target, most_tokens=terms.widths[-1], num_sequences=num_sequences, seed=seed, clock=clock)
    with target.runner.temporary_memory(), own:
        times = _Times(timer or own, plain=Verification(1, terms.contexts[0]), passes=[*fitted, *held_out])
        for patience in range(1, PATIENCE + 1):
            longest, num_sweeps = patience * budget_seconds, 0
            while num_sweeps < FEWEST_SWEEPS or (clock() - start < longest and num_sweeps < MOST_SWEEPS):
                times.sweep()
                num_sweeps += 1
            table = fit_costs(terms, times.seconds(fitted), times.seconds(held_out))
            if table.error.median <= GOOD_ERROR or clock() - start >= most_seconds:
                break
    return table


class _Times:
    """Times of passes, each next to plain passes."""

    def __init__(self, timer: Timer, plain: Pass, passes: Sequence[Pass]) -> None:
        self._timer, self._plain = timer, plain
        self._ratios: dict[Pass, list[float]] = {each: [] for each in passes}
        self._plain_seconds: list[float] = []

    def sweep(self) -> None:
        """Time every pass once."""
        passes = list(self._ratios)
        before = self._timer(self._plain)
        for start in range(0, len(passes), BESIDE_PLAIN):
            taken = {each: self._timer(each) for each in passes[start : start + BESIDE_PLAIN]}
            after = self._timer(self._plain)
            for each, seconds in taken.items():
                self._ratios[each].append(2 * seconds / (before + after))
            self._plain_seconds.append(before := after)

    def seconds(self, passes: Iterable[Pass]) -> dict[Pass, float]:
        """Return the seconds of each pass: its median ratio to neighbouring plain passes, times the median plain pass."""
        plain = float(np.median(self._plain_seconds))
        return {each: plain * float(np.median(self._ratios[each])) for each in passes}


def resolve_terms(
    target: Target, *, max_tokens: int, contexts: Iterable[int], bits: Collection[BitWidth] = ()
) -> Terms:
    """Return the terms to measure: widths up to `max_tokens` + 1, contexts that leave room for them, and precisions.

    A model without layers to quantise has no `bits`.
    In a short model context, the contexts are reduced before the widths. Raises ValueError as `measure_cost_table` does.
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
    known = tuple(sorted(set(bits))) if target.can_be_quantised else ()
    kinds = BlockKinds.of(target)
    return Terms(kinds, tuple(widths), tuple(contexts), target.lm_heads.num_rows, known, join_share(target))
