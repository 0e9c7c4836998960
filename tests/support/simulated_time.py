"""Simulated time: it passes only while blocks of the model run, so that a whole search takes the same seconds on any machine."""

from __future__ import annotations

import time

import pytest
from torch import nn

from tuner.stage_clock import StageClock


class SimulatedTime:
    """Seconds that pass with every run of a block: `per_block` each, plus `per_position` for every position of the pass."""

    def __init__(self, per_block: float, per_position: float = 0.0) -> None:
        self.now = 0.0
        self._per_block, self._per_position = per_block, per_position

    def read(self) -> float:
        """Return the seconds so far."""
        return self.now

    def charge(self, blocks: nn.ModuleList) -> None:
        """Let time pass whenever one of `blocks` runs."""
        for block in blocks:
            block.register_forward_hook(self._run)

    def replace_clocks(self, monkeypatch: pytest.MonkeyPatch) -> StageClock:
        """Put this time in place of every clock that a search reads, and return its own clock."""
        monkeypatch.setattr(time, "perf_counter", self.read)
        return StageClock()

    def _run(self, block: nn.Module, inputs: object, output: object) -> None:
        states = output[0] if isinstance(output, tuple) else output
        self.now += self._per_block + self._per_position * states.shape[-2]  # type: ignore[attr-defined]
