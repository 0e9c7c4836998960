"""Searches without their fixed waits: for tests that look at neither costs nor clocks."""

from __future__ import annotations

import inspect

import pytest

from benchmarks.small_search import planted_search
from decoding.timing.round_costs import measure_round_costs
from tuner.config import SearchConfig
from tuner.measuring.cost_table import measure_cost_table
from tuner.progress import Progress


def measure_costs_once(patch: pytest.MonkeyPatch) -> None:
    """Measure costs of passes and rounds in a single sweep, where usually seconds are spent."""
    patch.setattr("tuner.measuring.cost_table.FEWEST_SWEEPS", 1)
    patch.setattr("tuner.measuring.cost_table.PATIENCE", 1)
    patch.setattr("decoding.timing.round_costs.FEWEST_SWEEPS", 1)
    for measure in (measure_cost_table, measure_round_costs):
        patch.setitem(inspect.unwrap(measure).__kwdefaults__, "budget_seconds", 0.0)


def miss_the_dead_soon(patch: pytest.MonkeyPatch) -> None:
    """Let other processes know after seconds that one has died."""
    patch.setattr("tuner.search.storage.BEAT_SECONDS", 1)
    patch.setattr("tuner.search.storage.GRACE_SECONDS", 3)


def quick_planted_search(config: SearchConfig, progress: Progress) -> None:
    """Run `planted_search` like this, in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        measure_costs_once(patch)
        miss_the_dead_soon(patch)
        planted_search(config, progress)
