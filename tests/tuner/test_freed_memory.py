"""Freed memory: kept by glibc as usual, given back where asked, and kept again for what is timed in between."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tuner import freed_memory
from tuner.freed_memory import LARGE, USUAL, freed_blocks_kept, large_blocks_given_back


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

    def costs() -> int:
        assert limits[-1] == USUAL
        return 3

    with large_blocks_given_back():
        assert freed_blocks_kept()(costs)() == 3
        assert limits[-1] == LARGE
    assert limits[-1] == USUAL
