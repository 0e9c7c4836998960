"""Step: attention of one pass by each backend, called as a recorded pass calls it.

Query heads that share keys are stacked as positions, under an additive mask, over the slots of the pass's bucket. Flash attention
takes no mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.roofline import seconds_by_events
from benchmarks.gpu.shared import Shared
from decoding.errors import one_line
from decoding.runners.buckets import GPU_BUCKETS
from decoding.runners.graphs import CudaGraphs
from decoding.runners.masks import MaskKinds
from decoding.target.attention import attention_backends, grouped_attention
from decoding.timing.passes import Stopwatch

CONTEXTS, WIDTHS = (512, 4096), (1, 5)
HEADS, KEY_VALUE_HEADS, HEAD_DIM = 32, 8, 128
"""Sizes of an 8B model."""
CALLS, ROUNDS = 32, 7
"""Calls in one recording, as many as an 8B model has layers, and replays of it."""
BACKENDS = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)
"""Those that take a mask."""


@dataclass(frozen=True)
class _Recorded:
    """The output of many calls, as a recorder copies it."""

    output: Tensor

    def copied(self) -> _Recorded:
        return _Recorded(self.output.clone())


def backends(shared: Shared, seconds: float) -> dict[str, Any]:
    """Time each backend for each width and context, in microseconds per call."""
    rows = []
    for context, width in product(CONTEXTS, WIDTHS):
        for name, call in calls_of(shared.device, context, width).items():
            row: dict[str, Any] = {"positions": width, "after": context, "backend": name}
            try:
                row["us"] = 1e6 * _seconds(shared.device, call) / CALLS
            except RuntimeError as cause:  # backends refuse what they cannot run
                row["refused"] = one_line(cause)[:80]
            rows.append(row)
    return {"rows": rows, "calls": CALLS}


def calls_of(device: torch.device, context: int, width: int) -> dict[str, Callable[[], Tensor]]:
    """Return the attention of a pass of `width` positions after `context` by each backend, as the static runner has it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width = GPU_BUCKETS.width(width)
    end = context + width
    num_slots = GPU_BUCKETS.reach(end)
    query = torch.randn(1, HEADS, width, HEAD_DIM, device=device, dtype=dtype)
    keys, values = (torch.randn(1, KEY_VALUE_HEADS, num_slots, HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
    slots = torch.arange(context, end, device=device)
    (mask,) = MaskKinds((None,), additive=dtype).masks(slots, num_slots)
    mask = mask.repeat(1, 1, HEADS // KEY_VALUE_HEADS, 1)  # once per pass, for all layers

    def attend() -> Tensor:
        return grouped_attention(nn.Module(), query, keys, values, mask, scaling=HEAD_DIM**-0.5)[0]

    def attend_by(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return attend()

    def attend_by_choice() -> Tensor:
        with attention_backends(device):
            return attend()

    named = {backend.name.lower().removesuffix("_attention"): partial(attend_by, backend) for backend in BACKENDS}
    return {"chosen by torch": attend_by_choice, **named}


def _seconds(device: torch.device, call: Callable[[], Tensor]) -> float:
    """Return the median seconds of `CALLS` calls: recorded on a GPU, where launching them would take longer."""

    def run() -> _Recorded:
        output = call()
        for _ in range(CALLS - 1):
            output = call()
        return _Recorded(output)

    if device.type != "cuda":
        run()
        return median(Stopwatch(device).time(run) for _ in range(ROUNDS))
    _, play = CudaGraphs(device).record(run)
    return median(seconds_by_events(device, play) for _ in range(ROUNDS))
