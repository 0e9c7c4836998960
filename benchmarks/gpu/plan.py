"""The steps in order, the most valuable first.

First the compiler, which nothing else is to wait for; then whether replays compute what they should, as no figure means anything
otherwise; then what passes cost, and the figures that the project promises: switch of candidates, search, bench, roofline, kinds of
drafts, batches; then attention, whose choice of a backend it confirms, and losslessness of small models. For the last step
transformers compiles the whole model.
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
    """What is reserved for the step: some 1.5 times what it took on one H100, with the models that it is the first to need."""
    run: Callable[[Shared, float], dict[str, Any]]
    """Returns `rows` and other facts within these seconds. May raise anything: the cause is the step's outcome."""


def _bench(name: str, limit_seconds: float, batch_size: int, against: str, num_prompts: int) -> Step:
    run = partial(speed.profile_bench, batch_size=batch_size, against=against, num_prompts=num_prompts)
    return Step(name, limit_seconds, run)


PLAN: tuple[Step, ...] = (
    Step("environment", 15, correctness.environment),  # the start of the process counts to it
    Step("compile", 60, correctness.compilation),
    Step("replays-wide", 20, correctness.wide_replays),
    Step("passes", 10, trace.passes),
    Step("kernels", 5, trace.kernels),
    Step("switch", 40, speed.switching),
    Step("search", 120, speed.whole_search),
    Step("replays-again", 15, correctness.replays_again),
    _bench("bench-1", 60, 1, "hf hf-prompt-lookup", 8),
    Step("rates", 40, speed.rates),
    Step("kinds-1", 50, partial(speed.kinds, batch_size=1, num_prompts=3)),
    _bench("bench-4", 50, 4, "hf", 8),
    _bench("bench-16", 30, 16, "hf", 32),
    Step("kinds-4", 60, partial(speed.kinds, batch_size=4, num_prompts=8)),
    Step("kinds-16", 50, partial(speed.kinds, batch_size=16, num_prompts=32)),
    Step("prefix-reuse", 25, speed.prefix_reuse),
    Step("attention", 5, backends),
    Step("replays-tiny", 60, correctness.tiny_replays),
    Step("lossless-float32", 80, partial(speed.demo_losslessness, dtype="float32")),
    Step("lossless-bfloat16", 70, partial(speed.demo_losslessness, dtype="bfloat16")),
    _bench("hf-static", 120, 1, "hf-static", 4),
)
