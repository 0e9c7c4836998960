"""Peak memory of a contender beside the model's weights, each measured in a process of its own.

In one process the contenders would share caches and prepared passes, and freed memory of one would serve the next. A process
loads the model, touches every weight, and then makes one contender, which prepares and continues one batch. On a CPU the figure
is the growth of the resident memory, on a GPU that of torch's allocated memory.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from decoding.documents.strict_yaml import Document
from tuner.bench.task import BenchTask
from tuner.progress import Progress

PROGRAM = (sys.executable, "-m", "tuner.bench.memory_worker")
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to `clear_refs`, it sets the peak of the resident memory to its present size (Linux)."""


class MemoryOrder(Document):
    """The measurement asked of a process."""

    contender: str
    model: str
    revision: str | None
    dtype: str
    device: str
    profile: Path
    runner: str | None
    """Runner mode in place of the profile's; None for the profile's."""
    batch: tuple[tuple[int, ...], ...]
    """Token ids of the prompts to continue."""
    tuning_prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    threads: int


class PeakMemory(Document):
    """Bytes of the weights, and the most that a contender held beside them."""

    weights_bytes: int
    beside_weights_bytes: int


class MemoryGauge(Protocol):
    """Reads memory in bytes."""

    def start(self) -> int:
        """Forget earlier peaks, and return the memory in use."""

    def peak(self) -> int:
        """Return the most memory in use since the start."""


class ResidentMemory:
    """The resident memory of this process, by Linux."""

    def start(self) -> int:
        """See `MemoryGauge.start`."""
        CLEAR_REFS.write_text(RESET_PEAK)
        return self._read("VmRSS")

    def peak(self) -> int:
        """See `MemoryGauge.peak`."""
        return self._read("VmHWM")

    def _read(self, key: str) -> int:
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
        return int(line.split()[1]) * 1024


class AllocatedMemory:
    """The memory that torch has allocated on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> int:
        """See `MemoryGauge.start`."""
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """See `MemoryGauge.peak`."""
        return torch.cuda.max_memory_allocated(self._device)


def gauge_for(device: torch.device) -> MemoryGauge | None:
    """Return the gauge of a device, or None where peaks cannot be read."""
    if device.type == "cuda":
        return AllocatedMemory(device)
    return ResidentMemory() if device.type == "cpu" and CLEAR_REFS.exists() else None


def measure_memory(
    task: BenchTask, profile: Path, names: Sequence[str], progress: Progress
) -> tuple[dict[str, PeakMemory], dict[str, str]]:
    """Return the peak memory of each contender on the batch with the longest prompt, and why others have none."""
    if gauge_for(task.target.device) is None:
        return {}, dict.fromkeys(names, f"peaks cannot be read on {task.target.device} here")
    found: dict[str, PeakMemory] = {}
    failed: dict[str, str] = {}
    progress.stage("memory of each contender in a process of its own", len(names))
    for name in names:
        run = run_worker(_order(task, profile, name))
        if run.returncode == 0:
            found[name] = PeakMemory.model_validate_json(run.stdout.splitlines()[-1])
        else:
            failed[name] = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1][:160]
        progress.advance()
    return found, failed


def run_worker(order: MemoryOrder) -> subprocess.CompletedProcess[str]:
    """Run the measuring process to its end: its last line of output is a `PeakMemory`."""
    return subprocess.run(PROGRAM, input=order.model_dump_json(), capture_output=True, text=True, check=False)


def _order(task: BenchTask, profile: Path, name: str) -> MemoryOrder:
    return MemoryOrder(
        contender=name,
        model=task.loaded.name,
        revision=task.loaded.revision,
        dtype=str(task.target.dtype).removeprefix("torch."),
        device=str(task.target.device),
        profile=profile,
        runner=task.config.runner,
        batch=tuple(tuple(prompt) for prompt in max(task.batches, key=lambda batch: max(map(len, batch)))),
        tuning_prompts=tuple(prompt.token_ids for prompt in task.choosing),
        max_new_tokens=task.max_new_tokens,
        threads=torch.get_num_threads(),
    )
