"""The steps in order, the most valuable first.

First the compiler, which nothing else is to wait for; then whether replays compute what they should, as no figure means anything
otherwise; then the figures that the project promises: roofline, switch of candidates, search, bench, batches, losslessness; then
each kind of draft; then attention, whose choice of a backend is to be confirmed. For the last one transformers compiles the whole
model: it is no part of the ten minutes, and gets the time that the others leave, or the next run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from benchmarks.gpu import correctness, speed, trace
from benchmarks.gpu.attention import backends
from benchmarks.gpu.shared import Shared


class Step(NamedTuple):
    name: str
    limit_seconds: float
    """What is reserved for the step on one H100: our estimate, not measured. It includes models that it is the first to need."""
    run: Callable[[Shared, float], dict[str, Any]]
    """Returns `rows` and other facts within these seconds. May raise anything: the cause is the step's outcome."""


def _bench(name: str, limit_seconds: float, batch_size: int, against: str, num_prompts: int) -> Step:
    run = partial(speed.profile_bench, batch_size=batch_size, against=against, num_prompts=num_prompts)
    return Step(name, limit_seconds, run)


PLAN: tuple[Step, ...] = (
    Step("environment", 15, correctness.environment),  # the start of the process counts to it
    Step("compile", 110, correctness.compilation),
    Step("replays-wide", 25, correctness.wide_replays),
    Step("passes", 20, trace.passes),
    Step("kernels", 10, trace.kernels),
    Step("switch", 25, speed.switching),
    Step("search", 100, speed.whole_search),
    Step("replays-again", 15, correctness.replays_again),
    _bench("bench-1", 60, 1, "hf hf-prompt-lookup", 8),
    Step("rates", 60, speed.rates),
    Step("kinds-1", 60, partial(speed.kinds, batch_size=1, num_prompts=3)),
    _bench("bench-4", 40, 4, "hf", 8),
    _bench("bench-16", 50, 16, "hf", 32),
    Step("kinds-4", 40, partial(speed.kinds, batch_size=4, num_prompts=8)),
    Step("kinds-16", 40, partial(speed.kinds, batch_size=16, num_prompts=32)),
    Step("prefix-reuse", 20, speed.prefix_reuse),
    Step("attention", 10, backends),
    Step("replays-tiny", 60, correctness.tiny_replays),
    Step("lossless-float32", 70, partial(speed.demo_losslessness, dtype="float32")),
    Step("lossless-bfloat16", 70, partial(speed.demo_losslessness, dtype="bfloat16")),
    _bench("hf-static", 120, 1, "hf-static", 4),
)
