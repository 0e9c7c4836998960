"""Steps: what a pass costs by its width and context, and which kernels it spends its time in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.shared import Shared
from decoding.timing.passes import Stopwatch

WIDTHS, CONTEXTS = (1, 2, 3, 5, 9, 17, 33), (300, 2000)
ROUNDS, PASSES = 9, 10
TRACED = (1, 5)
"""Widths of the passes whose kernels are listed: plain decoding, and verification of four tokens."""
NUM_KERNELS, LONGEST_NAME = 14, 90


def passes(shared: Shared, seconds: float) -> dict[str, Any]:
    """Time the static runner's passes over one sequence, host included, as multiples of a plain one after the same context."""
    rows, watch = list[dict[str, Any]](), Stopwatch(shared.device)
    for context in CONTEXTS:
        run = _passes(shared, context)
        for width in WIDTHS:
            run(width)
        found = {width: list[float]() for width in WIDTHS}
        for _, width in product(range(ROUNDS), WIDTHS):  # in turns
            found[width].append(watch.time(partial(run, width)))
        plain = median(found[WIDTHS[0]])
        rows += [
            {"after": context, "positions": width, "ms": 1e3 * median(each), "plain passes": median(each) / plain}
            for width, each in found.items()
        ]
    return {"rows": rows}


def kernels(shared: Shared, seconds: float) -> dict[str, Any]:
    """List the kernels of a pass by the time that they take, with the time in which the device does nothing."""
    rows, is_gpu = list[dict[str, Any]](), shared.device.type == "cuda"
    watch, run = Stopwatch(shared.device), _passes(shared, CONTEXTS[0])
    for width in TRACED:
        run(width)
        bare = watch.time(partial(_repeat, run, width)) / PASSES
        activity = ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU
        with profile(activities=[activity]) as traced:
            watch.time(partial(_repeat, run, width))
        spent, calls = Counter[str](), Counter[str]()
        for event in traced.events():
            if event.device_type == (DeviceType.CUDA if is_gpu else DeviceType.CPU):
                spent[event.name] += event.self_device_time_total if is_gpu else event.self_cpu_time_total
                calls[event.name] += 1
        facts = {"positions": width}
        rows.append({**facts, "kernel": "a pass by the clock", "us": 1e6 * bare})
        rows.append({**facts, "kernel": "all kernels", "calls": calls.total() / PASSES, "us": spent.total() / PASSES})
        for name, each in spent.most_common(NUM_KERNELS):
            rows.append({**facts, "kernel": name[:LONGEST_NAME], "calls": calls[name] / PASSES, "us": each / PASSES})
    return {"rows": rows}


def _repeat(run: Callable[[int], None], width: int) -> None:
    for _ in range(PASSES):
        run(width)


def _passes(shared: Shared, context: int) -> Callable[[int], None]:
    """Return a function that runs one pass of so many positions after a context of random tokens."""
    target, stream = shared.static, torch.Generator().manual_seed(context)
    length = context + max(WIDTHS)
    ids = torch.randint(shared.source.config.vocab_size, (1, length), generator=stream).to(shared.device)
    cache = target.new_cache(length)

    @torch.inference_mode()
    def run(width: int) -> None:
        target.forward(ids[:, context : context + width], cache, context, last_only=width == 1)

    with torch.inference_mode():
        target.forward(ids[:, :context], cache, 0, last_only=True)
    return run
