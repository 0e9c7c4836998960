"""What a round of each arm costs at each load on this device, measured before the first request."""

from __future__ import annotations

import time
from collections.abc import Sequence

from decoding.arms.arm import Arm
from decoding.arms.chooser import LoadCosts, load_of
from decoding.timing.round_costs import measure_one_cost
from decoding.timing.stopwatch import ReadSeconds

BUDGET_SECONDS = 20.0
"""No higher load is measured once this has passed."""


def measure_load_costs(
    arms: Sequence[Arm],
    num_sequences: int,
    *,
    budget_seconds: float = BUDGET_SECONDS,
    clock: ReadSeconds = time.perf_counter,
) -> list[LoadCosts]:
    """Return what a usual round of each arm costs at the loads up to `num_sequences` side by side, in plain passes at that load.

    A load is measured with the fewest sequences that it stands for. Loads that cannot be measured within the budget cost what the
    highest measured one does: a draft that pays for few sequences seldom pays more for many.
    """
    start = clock()
    costs: list[dict[int, float]] = [{} for _ in arms]
    for load in range(1, load_of(num_sequences) + 1):
        is_late = load > 1 and clock() - start > budget_seconds
        for arm, found in zip(arms, costs, strict=True):
            drafter = arm.decoder.drafter
            assert drafter is not None, "every arm drafts"
            found[load] = (
                found[load - 1]
                if is_late
                else measure_one_cost(arm.decoder.target, drafter, arm.num_drafted, num_sequences=2 ** (load - 1))
            )
    return list(costs)
