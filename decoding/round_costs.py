"""Measure what a round costs on the device at hand: a short benchmark through the `Drafter` protocol, and so of any drafter."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from decoding.acceptance import Greedy
from decoding.draft_length import Controller, RoundCosts
from decoding.drafters.contract import Drafter
from decoding.drafters.lookup_first import steered_part
from decoding.target import Target
from decoding.text import Shaping, Text

# Costs bend at the first few tokens and at powers of two; in between, a straight line does.
WIDTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FEWEST_SWEEPS, MOST_SWEEPS = 2, 20
LEAST_COST = 1e-4  # of a plain pass: what a pass is taken to cost that was too short for the clock

Clock = Callable[[], float]


@torch.inference_mode()
def measure_round_costs(
    target: Target,
    drafter: Drafter,
    max_tokens: int,
    *,
    prompt_length: int = 64,
    budget_seconds: float = 0.4,
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> RoundCosts:
    """Time plain passes, drafts and verifications of up to `max_tokens` tokens behind a prompt of random ones.

    The prompt is one passage twice over, so that a drafter that copies has something to copy. Costs are for the rule that weighs
    them: of a lookup in front of another drafter nothing is measured, as no rule steers it.

    A sweep goes through all of `WIDTHS`, and sweeps are repeated, at least twice, until `budget_seconds` are spent. The fastest
    pass of each kind counts: what is cold or disturbed takes longer, never less. Lengths between the widths are interpolated.
    Where the context is short, the prompt gives way to the drafts, and they to the context. `seed` is that of the prompt;
    `clock` gives seconds.

    Raises `ValueError` if `max_tokens` or `prompt_length` is below 1, or if not a single token was drafted.
    """
    for name, value in {"max_tokens": max_tokens, "prompt_length": prompt_length}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    start = clock()
    bench = _Bench(target, steered_part(drafter), max_tokens, prompt_length, seed, clock)
    sweeps = [bench.sweep() for _ in range(FEWEST_SWEEPS)]
    while clock() - start < budget_seconds and len(sweeps) < MOST_SWEEPS:
        sweeps.append(bench.sweep())
    return _costs(sweeps)


@dataclass
class _Sweep:
    """Seconds of one pass of each kind; drafts and verifications by the number of tokens drafted."""

    plain: float
    draft: dict[int, float] = field(default_factory=dict)
    verify: dict[int, float] = field(default_factory=dict)


class _Bench:
    """A prompt that has been read, one token behind it, and the passes from there."""

    def __init__(
        self, target: Target, drafter: Drafter, max_tokens: int, prompt_length: int, seed: int, clock: Clock
    ) -> None:
        self._target, self._drafter, self._clock = target, drafter, clock
        room = target.context_length or prompt_length + 1 + max_tokens
        prompt_length = max(min(prompt_length, room - 1 - max_tokens), 1)
        longest = max(min(max_tokens, room - 1 - prompt_length), 0)
        self._widths = [*(width for width in WIDTHS if width < longest), longest]
        stream = torch.Generator().manual_seed(seed)
        passage = torch.randint(target.config.vocab_size, (prompt_length // 2 + 1,), generator=stream).tolist()
        *prompt, last = (passage * 2)[: prompt_length + 1]
        capacity = prompt_length + 1 + longest
        self._text, self._cache = Text(prompt, capacity, target.device), target.new_cache(capacity)
        drafter.prefill(self._text, self._cache)
        self._cache.length = self._text.length
        self._text.append([last])

    def sweep(self) -> _Sweep:
        """Time a plain pass, then a draft and its verification of every width, all from the same state."""
        text, cache = self._text, self._cache
        start = self._now()
        self._target.forward(text.span(cache.length, text.length), cache, cache.length, last_only=True)
        sweep = _Sweep(plain=self._now() - start)
        for width in self._widths:
            start = self._now()
            draft = self._drafter.draft(text, cache, Controller(width), Shaping(), Greedy(), width)
            drafted = self._now()
            self._drafter.verify(text, cache, draft)
            verified = self._now()
            cache.roll_back(text.length - 1)
            sweep.draft[draft.num_tokens], sweep.verify[draft.num_tokens] = drafted - start, verified - drafted
        return sweep

    def _now(self) -> float:
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)
        return self._clock()


def _costs(sweeps: list[_Sweep]) -> RoundCosts:
    draft = _fastest([sweep.draft for sweep in sweeps])
    verify = _rising(_fastest([sweep.verify for sweep in sweeps]))
    plain = min(*(sweep.plain for sweep in sweeps), *verify.values())
    steps = [seconds / width for width, seconds in draft.items() if width]
    if not steps:
        raise ValueError(
            "not a single token was drafted: the drafter proposes none, or the context has no room for one"
        )
    return RoundCosts(
        draft_step=_cost(min(steps), plain),
        verify=tuple(_cost(seconds, plain) for seconds in _interpolated(verify)),
    )


def _fastest(sweeps: list[dict[int, float]]) -> dict[int, float]:
    """The least seconds of each width, ascending."""
    widths = sorted(set().union(*sweeps))
    return {width: min(sweep[width] for sweep in sweeps if width in sweep) for width in widths}


def _rising(seconds: dict[int, float]) -> dict[int, float]:
    """No width slower than a wider one, which has more to compute: a pass that seemed so was disturbed."""
    return {width: min(value for wider, value in seconds.items() if wider >= width) for width in seconds}


def _interpolated(seconds: dict[int, float]) -> list[float]:
    """Values at 0, 1, 2 ... up to the last width, on straight lines between those given."""
    values = [seconds[0]]
    for low, high in pairwise(seconds):
        slope = (seconds[high] - seconds[low]) / (high - low)
        values += [seconds[low] + slope * (width - low) for width in range(low + 1, high + 1)]
    return values


def _cost(seconds: float, plain: float) -> float:
    """In units of the plain pass, to the four digits that a measurement is worth at most."""
    return max(round(seconds / plain, 4), LEAST_COST) if plain else 1.0  # a clock that stands still tells nothing apart
