"""The fastest runner of a model on the device at hand, found by timing the same passes with each."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from decoding.errors import UnsupportedRunnerError
from decoding.lockstep import shared_batch_size
from decoding.runners import PLAIN_RUNNER, RUNNERS
from decoding.target import Target
from decoding.timing.passes import Prompted, PromptedBatch

CONTEXT_TOKENS = 64
WIDTHS = (1, 1, 1, 5)
"""Passes that are timed, about as speculative decoding runs them: a few of one token, then a verification."""
FEWEST_SWEEPS, MOST_SWEEPS, SECONDS = 3, 12, 4.0
"""Sweeps of a comparison, at least and at most, and the seconds after which none is added: long passes are hardly disturbed."""


@dataclass(frozen=True)
class RunnerChoice:
    """The target with the chosen runner, and the reason for the choice."""

    target: Target
    reason: str


def fastest_runner(model: PreTrainedModel, *, num_sequences: int = 1) -> RunnerChoice:
    """Return `model` with the runner that is fastest here; runners that cannot run the model are left out.

    Passes are over `num_sequences` sequences in lockstep, or over one if they cannot share passes.
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
        ratio = _ratio(plain, rival, num_sequences)
        only = "" if ratio > 1 else "only "
        reasons.append(f"{name} runs the same passes {only}{ratio:.2f} times as fast as {PLAIN_RUNNER}")
        if ratio > best:
            chosen, best = rival, ratio
    return RunnerChoice(chosen, "; ".join(reasons))


@torch.inference_mode()
def _ratio(plain: Target, rival: Target, num_sequences: int) -> float:
    """Return the speed of `rival` over the speed of `plain`: the median over interleaved sweeps, after an uncounted one."""
    num_sequences = min(shared_batch_size(target, num_sequences) for target in (plain, rival))
    batches = [(target, _prompted(target, num_sequences)) for target in (plain, rival)]
    for each in batches:
        _seconds(*each)
    sweeps, began = list[list[float]](), time.perf_counter()
    while len(sweeps) < FEWEST_SWEEPS or (len(sweeps) < MOST_SWEEPS and time.perf_counter() - began < SECONDS):
        sweeps.append([_seconds(*each) for each in batches])
    return statistics.median(first / second for first, second in sweeps)


def _prompted(target: Target, num_sequences: int) -> PromptedBatch:
    room = target.context_length or CONTEXT_TOKENS + max(WIDTHS)
    start = max(min(CONTEXT_TOKENS, room - max(WIDTHS)), 1)
    stream, length = torch.Generator().manual_seed(0), start + max(WIDTHS)
    texts = torch.randint(target.config.vocab_size, (num_sequences, length), generator=stream).tolist()
    return PromptedBatch(target, texts, start, length)


def _seconds(target: Target, batch: PromptedBatch) -> float:
    """Return the seconds of one pass of each of `WIDTHS`."""

    def run(width: int, sequence: Prompted) -> None:
        target.forward(sequence.ahead(width), sequence.cache, sequence.cache.length)

    start = batch.watch.now()
    for width in WIDTHS:
        batch.all(partial(run, width))
    return batch.watch.now() - start
