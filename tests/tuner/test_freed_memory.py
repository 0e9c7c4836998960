"""Freed memory: kept by glibc as usual, given back where asked, and kept again for what is timed in between."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from studies.contract import Problem
from tests.support.costs import made_up_costs
from tests.support.tiny import tiny_target
from tuner import freed_memory
from tuner.freed_memory import LARGE, USUAL, large_blocks_given_back
from tuner.search.study_trials import timed_as_usual


@pytest.mark.skipif(sys.platform != "linux" or freed_memory._glibc() is None, reason="glibc only")
def test_large_blocks_are_given_back_where_asked_and_kept_elsewhere() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.freed_blocks"], capture_output=True, text=True, check=True
    )
    shares = json.loads(ran.stdout)
    assert shares["given_back"] < 0.1
    assert shares["kept"] > 0.8
    assert shares["left_after_it"] < 0.1, "what was kept is given back afterwards"
    assert shares["left_at_the_end"] < 0.1
    assert shares["as_usual"] > 0.8
    assert shares["left_at_the_next"] < 0.1, "what was free before is given back too"


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
