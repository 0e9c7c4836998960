"""Which runner a model is to be run by on the device at hand: the one asked for, or the faster one, found by timing both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from decoding.errors import UnsupportedRunnerError
from decoding.target import Target

CONTEXT_TOKENS = 64
WIDTHS = (1, 1, 1, 5)
"""Passes that are timed, about as speculative decoding runs them: a few of one token, then a verification."""
NUM_SWEEPS = 12

Clock = Callable[[], float]


@dataclass(frozen=True)
class Choice:
    """The target, by the runner chosen, and a word on why."""

    target: Target
    reason: str


def choose_runner(
    model: PreTrainedModel, name: str, *, exact_width: int | None = None, clock: Clock = time.perf_counter
) -> Choice:
    """`model` by the runner `name`; if that is `auto`, by the faster one, or by `eager` if the model cannot be run otherwise.

    `exact_width` asks for the bit-exact mode (see `Target`), which the static runner alone has. Raises `UnsupportedRunnerError` for
    a runner by name that cannot run the model, or that there is none of.
    """
    if exact_width is not None:
        return Choice(
            Target(model, "static" if name == "auto" else name, exact_width=exact_width), "it has a bit-exact mode"
        )
    if name != "auto":
        return Choice(Target(model, name), "as asked")
    eager = Target(model)
    try:
        static = Target(model, "static")
    except UnsupportedRunnerError as cause:
        return Choice(eager, str(cause))
    ratio = _ratio(eager, static, clock)
    if ratio > 1:
        return Choice(static, f"static runs the same passes {ratio:.2f} times as fast as eager")
    return Choice(eager, f"static runs the same passes only {ratio:.2f} times as fast as eager")


@torch.inference_mode()
def _ratio(eager: Target, static: Target, clock: Clock) -> float:
    """How many times as fast the second runs: the median over sweeps, the two in turn, after one that is not counted."""
    benches = [_Bench(target, clock) for target in (eager, static)]
    for bench in benches:
        bench.sweep()
    sweeps = [[bench.sweep() for bench in benches] for _ in range(NUM_SWEEPS)]
    return statistics.median(first / second for first, second in sweeps)


class _Bench:
    """A text that has been read, and passes from there."""

    def __init__(self, target: Target, clock: Clock) -> None:
        self._target, self._clock = target, clock
        room = target.context_length or CONTEXT_TOKENS + max(WIDTHS)
        self._start = max(min(CONTEXT_TOKENS, room - max(WIDTHS)), 1)
        length = self._start + max(WIDTHS)
        stream = torch.Generator().manual_seed(0)
        self._ids = torch.randint(target.config.vocab_size, (1, length), generator=stream).to(target.device)
        self._cache = target.new_cache(length)
        target.forward(self._ids[:, : self._start], self._cache, 0, last_only=True)

    def sweep(self) -> float:
        """Seconds of one pass of each of `WIDTHS`."""
        start = self._now()
        for width in WIDTHS:
            self._target.forward(self._ids[:, self._start : self._start + width], self._cache, self._start)
        return self._now() - start

    def _now(self) -> float:
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)
        return self._clock()
