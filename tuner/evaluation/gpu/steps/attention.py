"""Attention of one pass by each backend, after short and long contexts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from decoding.errors import one_line
from decoding.runners.graphs import CudaGraphs
from decoding.timing.stopwatch import Stopwatch
from tuner.bench.roofline import seconds_by_events
from tuner.evaluation.gpu.contract import Result
from tuner.evaluation.gpu.shared import Shared

CONTEXTS, WIDTHS = (512, 4096), (1, 5)
HEADS, KEY_VALUE_HEADS, HEAD_DIM = 32, 8, 128
CALLS, ROUNDS = 32, 7
"""Calls in one recording, as many as an 8B model has layers, and replays of it."""
BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)


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
        """Time each backend, with and without a mask, for each width and context."""
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
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query = torch.randn(1, HEADS, width, HEAD_DIM, device=device, dtype=dtype)
    keys, values = (torch.randn(1, KEY_VALUE_HEADS, context, HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
    mask = torch.zeros(1, 1, width, context, device=device, dtype=dtype)
    calls: dict[str, Callable[[], Tensor]] = {}
    for backend in BACKENDS:
        for name, masked in (("", None), (" + mask", mask)):
            calls[f"{backend.name.lower().removesuffix('_attention')}{name}"] = _call(
                backend, query, keys, values, masked
            )
    if (varlen := _varlen(query, keys, values)) is not None:
        calls["varlen"] = varlen
    found: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, call in calls.items():
        try:
            found[name] = 1e6 * _seconds(device, call, num_calls) / num_calls
        except RuntimeError as cause:  # backends refuse what they cannot run
            failed[name] = one_line(cause)[:160]
    return {"microseconds": found, "failed": failed}


def _call(
    backend: SDPBackend, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)

    return call


def _varlen(query: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Tensor] | None:
    """Return variable-length attention where this torch has it for grouped queries, on CUDA only."""
    if query.device.type != "cuda" or "enable_gqa" not in inspect.signature(varlen_attn).parameters:
        return None  # torch 2.11 has no argument for grouped queries
    packed = [each[0].transpose(0, 1).contiguous() for each in (query, keys, values)]
    ends = [torch.tensor([0, each.shape[0]], dtype=torch.int32, device=query.device) for each in packed[:2]]
    arguments: list[Any] = [*packed, *ends, *(each.shape[0] for each in packed[:2])]
    return lambda: cast(Tensor, varlen_attn(*arguments, enable_gqa=True))


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
