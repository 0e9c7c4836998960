"""Signs that other work disturbed a measurement: load, plain decoding that varies, a cost table that fits badly.

Nothing here corrects a figure. Pairs of neighbouring decodings already make speed-ups robust; these signs tell a reader how far
absolute rates can be trusted, and when to measure again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from pydantic import Field

from decoding.documents.strict_yaml import Document
from studies.measurement import MOST_WAITING, Measurement

MOST_VARIATION = 0.10
"""Relative difference between blocks of plain decoding above which the machine counts as noisy."""
TASKS = Path("/proc/self/task")
MOST_COST_ERROR = 0.10
"""Median relative error of the cost table on held-out passes above which it counts as badly fitted."""


class MachineNoise(Document):
    """Signs of disturbance in one search. None is unknown."""

    plain_variation: float | None = Field(
        None, description="fastest over slowest block of plain decoding on the same prompts, less 1"
    )
    load: float | None = Field(None, description="highest load average of a minute, this process included")
    cores: int = Field(description="processors of the machine, to which the load refers")
    waiting: float | None = Field(
        None, description="share of the time of the confirmation in which decoding waited for a processor"
    )
    cost_error: float | None = Field(None, description="median relative error of the cost table on held-out passes")

    @property
    def signs(self) -> tuple[str, ...]:
        """What counts as noise, in words; empty for a quiet machine."""
        found = list(self.disturbances)
        if self.cost_error is not None and self.cost_error > MOST_COST_ERROR:
            found.append(f"the cost table predicts held-out passes within {self.cost_error:.0%} only")
        return tuple(found)

    @property
    def disturbances(self) -> tuple[str, ...]:
        """The signs that put measured figures in doubt, not predictions alone."""
        found = []
        if self.waiting is not None and self.waiting > MOST_WAITING:
            found.append(f"decoding waited for a processor for {self.waiting:.0%} of its time")
        if self.plain_variation is not None and self.plain_variation > MOST_VARIATION:
            found.append(f"plain decoding of the same prompts varied by {self.plain_variation:.0%} between blocks")
        # The load counts this process too, and tells of the whole search: it is asked where waiting is not known.
        if self.waiting is None and self.load is not None and self.load > self.cores:
            found.append(f"the load average reached {self.load:.1f} on {self.cores} cores")
        return tuple(found)


class MachineWatch:
    """Collects the signs of one search."""

    def __init__(self) -> None:
        self._load: float | None = None
        self._cost_error: float | None = None

    def look(self) -> None:
        """Note the load average, where the system has one."""
        if hasattr(os, "getloadavg"):
            self._load = max(self._load or 0.0, os.getloadavg()[0])

    def note_cost_error(self, median: float) -> None:
        """Note the median error of a cost table; the worst of several counts."""
        self._cost_error = max(self._cost_error or 0.0, median)

    def noise(self, plain: Iterable[Measurement], confirmed: Measurement) -> MachineNoise:
        """Return the signs so far; `plain` are measurements on one bench, whose prompts have the same indices."""
        load = None if self._load is None else round(self._load, 2)
        return MachineNoise(
            plain_variation=plain_variation(plain),
            load=load,
            cores=os.cpu_count() or 1,
            waiting=confirmed.waiting_share,
            cost_error=self._cost_error,
        )


def plain_variation(blocks: Iterable[Measurement]) -> float | None:
    """Return the fastest over the slowest block of plain decoding, less 1; None if fewer than two blocks can be compared.

    A block is one measurement. Its rate is the median, over its prompts, of the plain rate relative to the prompt's median over
    all blocks: prompts differ in length, and one slow moment is not a slow block. Our formulation.
    """
    of_prompts: dict[int, list[float]] = {}
    rates: list[dict[int, float]] = []
    for block in blocks:
        own = {s.prompt: s.plain_tokens / s.plain_seconds for s in block.samples if s.plain_seconds > 0}
        rates.append(own)
        for prompt, rate in own.items():
            of_prompts.setdefault(prompt, []).append(rate)
    usual = {prompt: float(np.median(each)) for prompt, each in of_prompts.items() if len(each) > 1}
    relative = [[rate / usual[prompt] for prompt, rate in own.items() if prompt in usual] for own in rates]
    medians = [float(np.median(each)) for each in relative if each]
    return max(medians) / min(medians) - 1 if len(medians) > 1 else None


def seconds_waited() -> float | None:
    """Return the seconds so far in which threads of this process were ready to run and waited for a processor.

    None where the system does not say. Threads that have ended are not counted.
    """
    waited = [int(of_thread.split()[1]) for task in _tasks() if (of_thread := _read(task / "schedstat"))]
    return sum(waited) / 1e9 if waited else None


def _tasks() -> list[Path]:
    try:
        return list(TASKS.iterdir())
    except OSError:
        return []  # no Linux


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""  # the thread has ended, or the kernel keeps no such figures
