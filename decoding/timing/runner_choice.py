"""Which runner a model is to be run by on the device at hand: the one asked for, or the faster one, found by timing both."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from decoding.errors import UnsupportedRunnerError
from decoding.lockstep import Lockstep, shared_batch_size
from decoding.target import Target
from decoding.timing.stopwatch import Clock, Stopwatch

CONTEXT_TOKENS = 64
WIDTHS = (1, 1, 1, 5)
"""Passes that are timed, about as speculative decoding runs them: a few of one token, then a verification."""
NUM_SWEEPS = 12


@dataclass(frozen=True)
class RunnerChoice:
    """The target, by the runner chosen, and a word on why."""

    target: Target
    reason: str


def choose_runner(
    model: PreTrainedModel,
    name: str,
    *,
    exact_width: int | None = None,
    num_texts: int = 1,
    clock: Clock = time.perf_counter,
) -> RunnerChoice:
    """`model` by the runner `name`; if that is `auto`, by the faster one, or by `eager` if the model cannot be run otherwise.

    Faster is what passes over `num_texts` texts in step say, or, where texts take turns, those over one.
    `exact_width` asks for the bit-exact mode (see `Target`), which the static runner alone has. Raises `UnsupportedRunnerError` for
    a runner by name that cannot run the model, or that there is none of.
    """
    if exact_width is not None:
        return RunnerChoice(
            Target(model, "static" if name == "auto" else name, exact_width=exact_width), "it has a bit-exact mode"
        )
    if name != "auto":
        return RunnerChoice(Target(model, name), "as asked")
    eager = Target(model)
    try:
        static = Target(model, "static")
    except UnsupportedRunnerError as cause:
        return RunnerChoice(eager, str(cause))
    ratio = _ratio(eager, static, num_texts, clock)
    if ratio > 1:
        return RunnerChoice(static, f"static runs the same passes {ratio:.2f} times as fast as eager")
    return RunnerChoice(eager, f"static runs the same passes only {ratio:.2f} times as fast as eager")


@torch.inference_mode()
def _ratio(eager: Target, static: Target, num_texts: int, clock: Clock) -> float:
    """How many times as fast the second runs: the median over sweeps, the two in turn, after one that is not counted."""
    num_texts = min(shared_batch_size(target, num_texts) for target in (eager, static))
    benches = [_RunnerBench(target, num_texts, clock) for target in (eager, static)]
    for bench in benches:
        bench.sweep()
    sweeps = [[bench.sweep() for bench in benches] for _ in range(NUM_SWEEPS)]
    return statistics.median(first / second for first, second in sweeps)


class _RunnerBench:
    """Texts in step that have been read, and passes from there."""

    def __init__(self, target: Target, num_texts: int, clock: Clock) -> None:
        self._target, self._watch = target, Stopwatch(target.device, clock)
        room = target.context_length or CONTEXT_TOKENS + max(WIDTHS)
        self._start = max(min(CONTEXT_TOKENS, room - max(WIDTHS)), 1)
        length = self._start + max(WIDTHS)
        stream = torch.Generator().manual_seed(0)
        self._ids = torch.randint(target.config.vocab_size, (num_texts, length), generator=stream).to(target.device)
        self._lockstep = Lockstep(target, num_texts, length)
        self._caches = [self._lockstep.new_cache(row, length) for row in range(num_texts)]
        self._all(0, self._start)

    def sweep(self) -> float:
        """Seconds of one pass of each of `WIDTHS`."""
        start = self._watch.now()
        for width in WIDTHS:
            self._all(self._start, width)
        return self._watch.now() - start

    def _all(self, start: int, width: int) -> None:
        """One pass of all texts over so many positions."""

        def run(row: int) -> None:
            token_ids = self._ids[row : row + 1, start : start + width]
            self._target.forward(token_ids, self._caches[row], start, last_only=start == 0)

        self._lockstep.run_to_end([partial(run, row) for row in range(len(self._caches))])
