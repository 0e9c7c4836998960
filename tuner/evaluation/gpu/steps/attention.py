"""Attention of one pass by each backend, after short and long contexts, called as a recorded pass calls it.

Query heads that share keys are stacked as positions, under an additive mask, over the slots of the pass's bucket; flash attention,
which takes no mask, is the kernel of variable lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from decoding.cache.used_lengths import used_lengths
from decoding.errors import UnsupportedRunnerError, one_line
from decoding.runners.buckets import GPU_BUCKETS
from decoding.runners.graphs import CudaGraphs
from decoding.runners.masks import MaskKinds
from decoding.target.attention import grouped_attention
from decoding.target.backends import attention_backends
from decoding.target.varlen import find_kernel, varlen_attention
from decoding.timing.stopwatch import Stopwatch
from tuner.evaluation.gpu.contract import Result
from tuner.evaluation.gpu.roofline import seconds_by_events
from tuner.evaluation.gpu.shared import Shared

CONTEXTS, WIDTHS = (512, 4096), (1, 5)
HEADS, KEY_VALUE_HEADS, HEAD_DIM = 32, 8, 128
CALLS, ROUNDS = 32, 7
"""Calls in one recording, as many as an 8B model has layers, and replays of it."""
BACKENDS = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)
"""Those that take a mask."""
CHOSEN, VARLEN = "chosen by torch", "flash by variable lengths"


@dataclass(frozen=True)
class _Recorded:
    """The output of many calls, as a recorder copies it."""

    output: Tensor

    def copied(self) -> _Recorded:
        return _Recorded(self.output.clone())


@dataclass(frozen=True)
class AttentionBackends:
    """Step: microseconds of one call of attention with the sizes of an 8B model."""

    contexts: tuple[int, ...] = CONTEXTS
    calls: int = CALLS
    name: str = "attention"
    question: str = "Which attention backend is fastest for a few positions after a long context?"
    limit_seconds: float = 10
    pessimistic_seconds: float = 9

    def run(self, shared: Shared, seconds: float) -> Result:
        """Time each backend for each width and context."""
        rows = [
            {"context": context, "width": width, **_times(shared.device, context, width, self.calls)}
            for context, width in product(self.contexts, WIDTHS)
        ]
        return {"rows": rows, "calls": self.calls}

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        """Yield the microseconds per call by context and width."""
        for row in result["rows"]:
            times = [f"{name} {micro:.0f} µs" for name, micro in row["microseconds"].items()]
            yield f"{row['width']} after {row['context']}: {', '.join(times)}"


def _times(device: torch.device, context: int, width: int, num_calls: int) -> dict[str, Any]:
    """Return microseconds per call by backend, and why others do not run."""
    found: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, call in calls_of(device, context, width).items():
        try:
            found[name] = 1e6 * _seconds(device, call, num_calls) / num_calls
        except (RuntimeError, UnsupportedRunnerError) as cause:  # backends refuse what they cannot run
            failed[name] = one_line(cause)[:160]
    return {"microseconds": found, "failed": failed}


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

    def attend_by_lengths() -> Tensor:
        module = nn.Module()
        module.__dict__.update(sdtune_kernel=find_kernel(device, dtype), sdtune_reach=(-1, 0))
        return varlen_attention(module, query, by_slot[0], by_slot[1], lengths, scaling=HEAD_DIM**-0.5)[0]

    # A cache of this kind of attention has the heads of a slot side by side.
    by_slot = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (keys, values)]
    lengths = used_lengths(slots[:1] + width, width, num_slots)
    named = {backend.name.lower().removesuffix("_attention"): partial(attend_by, backend) for backend in BACKENDS}
    return {CHOSEN: attend_by_choice, **named, VARLEN: attend_by_lengths}


def _seconds(device: torch.device, call: Callable[[], Tensor], num_calls: int) -> float:
    """Return the median seconds of `num_calls` calls: recorded on a GPU, where launching them would take longer."""

    def run() -> _Recorded:
        output = call()
        for _ in range(num_calls - 1):
            output = call()
        return _Recorded(output)

    if device.type != "cuda":
        run()
        return median(Stopwatch(device).time(run) for _ in range(ROUNDS))
    _, play = CudaGraphs(device).record(run)
    return median(seconds_by_events(device, play) for _ in range(ROUNDS))
