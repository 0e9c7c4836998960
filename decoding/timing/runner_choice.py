"""The fastest runner of a model on the device at hand, found by timing the same passes with each."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from decoding.errors import UnsupportedRunnerError
from decoding.lockstep import Lockstep, shared_batch_size
from decoding.runners import PLAIN_RUNNER, RUNNERS
from decoding.target import Target
from decoding.timing.stopwatch import ReadSeconds, Stopwatch

CONTEXT_TOKENS = 64
WIDTHS = (1, 1, 1, 5)
"""Passes that are timed, about as speculative decoding runs them: a few of one token, then a verification."""
NUM_SWEEPS = 12


@dataclass(frozen=True)
class RunnerChoice:
    """The target with the chosen runner, and the reason for the choice."""

    target: Target
    reason: str


def fastest_runner(
    model: PreTrainedModel, *, num_sequences: int = 1, clock: ReadSeconds = time.perf_counter
) -> RunnerChoice:
    """Return `model` with the runner that is fastest here; runners that cannot run the model are left out.

    Passes are over `num_sequences` sequences in lockstep, or over one if they cannot share passes. `clock` gives seconds.
    """
    plain = Target(model, PLAIN_RUNNER)
    chosen, best, reasons = plain, 1.0, list[str]()
    for name in RUNNERS:
        if name == PLAIN_RUNNER:
            continue
        try:
            rival = Target(model, name)
        except UnsupportedRunnerError as cause:
            reasons.append(str(cause))
            continue
        ratio = _ratio(plain, rival, num_sequences, clock)
        only = "" if ratio > 1 else "only "
        reasons.append(f"{name} runs the same passes {only}{ratio:.2f} times as fast as {PLAIN_RUNNER}")
        if ratio > best:
            chosen, best = rival, ratio
    return RunnerChoice(chosen, "; ".join(reasons))


@torch.inference_mode()
def _ratio(plain: Target, rival: Target, num_sequences: int, clock: ReadSeconds) -> float:
    """Return the speed of `rival` over the speed of `plain`: the median over interleaved sweeps, after an uncounted one."""
    num_sequences = min(shared_batch_size(target, num_sequences) for target in (plain, rival))
    benches = [_RunnerBench(target, num_sequences, clock) for target in (plain, rival)]
    for bench in benches:
        bench.sweep()
    sweeps = [[bench.sweep() for bench in benches] for _ in range(NUM_SWEEPS)]
    return statistics.median(first / second for first, second in sweeps)


class _RunnerBench:
    """Sequences in lockstep whose prompts are in the cache, and the passes that follow."""

    def __init__(self, target: Target, num_sequences: int, clock: ReadSeconds) -> None:
        self._target, self._watch = target, Stopwatch(target.device, clock)
        room = target.context_length or CONTEXT_TOKENS + max(WIDTHS)
        self._start = max(min(CONTEXT_TOKENS, room - max(WIDTHS)), 1)
        length = self._start + max(WIDTHS)
        stream = torch.Generator().manual_seed(0)
        self._ids = torch.randint(target.config.vocab_size, (num_sequences, length), generator=stream).to(target.device)
        self._lockstep = Lockstep(target, num_sequences, length)
        self._caches = [self._lockstep.new_cache(row, length) for row in range(num_sequences)]
        self._all(0, self._start)

    def sweep(self) -> float:
        """Seconds of one pass of each of `WIDTHS`."""
        start = self._watch.now()
        for width in WIDTHS:
            self._all(self._start, width)
        return self._watch.now() - start

    def _all(self, start: int, width: int) -> None:
        """One pass of all texts over this number of positions."""

        def run(row: int) -> None:
            token_ids = self._ids[row : row + 1, start : start + width]
            self._target.forward(token_ids, self._caches[row], start, last_only=start == 0)

        self._lockstep.run_to_end([partial(run, row) for row in range(len(self._caches))])
