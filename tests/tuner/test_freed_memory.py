"""Freed memory: kept by glibc as usual, given back where asked, and kept again for what is timed in between."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from studies.contract import Problem
from tests.support.costs import made_up_costs
from tests.support.tiny import tiny_target
from tuner import freed_memory
from tuner.freed_memory import LARGE, USUAL, freed_blocks_kept, large_blocks_given_back
from tuner.search.study_sequence import timed_as_usual

NUM_BLOCKS, BLOCK = 40, 2 * LARGE
"""Many, as the test runner's own memory varies by some megabytes meanwhile."""


def _resident() -> int:
    """Bytes of the process's memory that no file backs."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def _bytes_left_by_freed_blocks() -> int:
    """Use and free large blocks between small ones, which stay; return what the process has kept of them."""
    before = _resident()
    blocks, small = [], []
    for _ in range(NUM_BLOCKS):
        blocks.append(torch.ones(BLOCK, dtype=torch.uint8))
        small.append(torch.ones(2**16, dtype=torch.uint8))
    assert _resident() - before > 0.9 * NUM_BLOCKS * BLOCK
    blocks.clear()
    kept = _resident() - before - len(small) * 2**16
    del small
    return kept


@pytest.mark.skipif(sys.platform != "linux" or freed_memory._glibc() is None, reason="glibc only")
def test_large_blocks_are_given_back_where_asked_and_kept_elsewhere() -> None:
    whole = NUM_BLOCKS * BLOCK
    with large_blocks_given_back():
        assert _bytes_left_by_freed_blocks() < 0.1 * whole
        with freed_blocks_kept():
            assert _bytes_left_by_freed_blocks() > 0.8 * whole
        assert _bytes_left_by_freed_blocks() < 0.1 * whole
        before = _resident()
    assert _bytes_left_by_freed_blocks() > 0.8 * whole, "as usual again"
    with large_blocks_given_back():
        assert _resident() < before + 0.1 * whole, "what was free before is given back too"


def test_passes_are_timed_with_freed_memory_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(freed_memory, "_keep_less_than", limits.append)
    target = tiny_target(2)

    def costs(max_tokens: int) -> object:
        assert limits[-1] == USUAL
        return made_up_costs(target, max_tokens)

    problem = Problem(target, ((1, 2),), ((3, 4),), earlier={}, seed=0, costs=costs)  # type: ignore[arg-type]
    with large_blocks_given_back():
        measured = timed_as_usual(problem).costs
        assert measured is not None
        measured(3)
        assert limits[-1] == LARGE
    assert limits[-1] == USUAL
