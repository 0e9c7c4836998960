"""Costs of decoding rounds on the device at hand: a short benchmark of any drafter, in plain passes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch

from decoding.acceptance import Greedy
from decoding.decode import Request
from decoding.draft_length import Controller, Looking, RoundCosts
from decoding.drafters.contract import Drafter, Proposal, max_leaves_of
from decoding.drafters.lookup_first import steered_part
from decoding.lockstep import Lockstep, shared_batch_size
from decoding.target import Target
from decoding.text import Ending, Shaping, TokenSequence
from decoding.timing.stopwatch import ReadSeconds, Stopwatch

# Costs bend at the first few tokens and at powers of two; in between, a straight line does.
WIDTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FEWEST_SWEEPS, MOST_SWEEPS = 5, 20
LEAST_COST = 1e-4  # of a plain pass: what a pass is taken to cost that was too short for the clock

T = TypeVar("T")


@torch.inference_mode()
def measure_round_costs(
    target: Target,
    drafter: Drafter,
    max_tokens: int,
    *,
    num_sequences: int = 1,
    prompt_length: int = 64,
    budget_seconds: float = 0.8,
    clock: ReadSeconds = time.perf_counter,
) -> RoundCosts:
    """Time plain passes, drafts and verifications of up to `max_tokens` tokens after a random prompt.

    The prompt repeats one passage, so that a drafter that copies has something to copy. A lookup that is tried before another
    drafter is not measured, because no rule steers it.

    A sweep times a round of each of `WIDTHS` between two plain steps, as decoding alternates between them: repeating one pass
    would find warm processor caches and take a few per cent less. There are at least five sweeps, and more until
    `budget_seconds` are spent. The cost of a width is the median over sweeps of its seconds over the seconds of the adjacent
    plain steps. The extra time of a draft's first step counts to the verification. Other lengths are interpolated. The longest
    draft is timed again with a rule that looks at every token.

    With `num_sequences` above 1 all passes are over a batch of that size in lockstep (`decoding.lockstep`), each sequence after its
    own prompt; sequences that cannot share passes (`Target.unbatchable_reason`) cost what one does.

    Where the context is short, the prompt is shortened first, then the drafts. `clock` gives seconds.

    Raises ValueError if `max_tokens`, `num_sequences` or `prompt_length` is below 1, or if no token was drafted.
    """
    for name, value in {
        "max_tokens": max_tokens,
        "num_sequences": num_sequences,
        "prompt_length": prompt_length,
    }.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    start = clock()
    num_sequences = shared_batch_size(target, num_sequences)
    bench = _RoundBench(target, steered_part(drafter), max_tokens, prompt_length, num_sequences, clock)
    if target.runner.buckets is not None:
        bench.sweep()  # a first pass of a fixed shape makes it ready
        start = clock()
    sweeps = [bench.sweep() for _ in range(FEWEST_SWEEPS)]
    while clock() - start < budget_seconds and len(sweeps) < MOST_SWEEPS:
        sweeps.append(bench.sweep())
    return _costs(sweeps)


@dataclass(frozen=True)
class _Timed:
    """Seconds of one round, and of the plain steps before and after it."""

    num_drafted: int
    draft: float
    verify: float
    plain: float
    looks: bool = False


class _RoundBench:
    """Prompts in the cache, each followed by one token, and the passes that follow."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        max_tokens: int,
        prompt_length: int,
        num_sequences: int,
        clock: ReadSeconds,
    ) -> None:
        self._target, self._drafter, self._watch = target, drafter, Stopwatch(target.device, clock)
        room = target.context_length or prompt_length + 1 + max_tokens
        prompt_length = max(min(prompt_length, room - 1 - max_tokens), 1)
        longest = max(min(max_tokens, room - 1 - prompt_length), 0)
        self._widths = [*(width for width in WIDTHS if width < longest), longest]
        capacity = prompt_length + 1 + longest + max_leaves_of(drafter)
        self._lockstep = Lockstep(target, num_sequences, capacity)
        self._greedy = Request([0], Ending(longest + 1))
        self._texts: list[TokenSequence] = []
        self._caches = [self._lockstep.new_cache(row, capacity) for row in range(num_sequences)]
        stream, last_tokens = torch.Generator().manual_seed(0), []
        for row in range(num_sequences):
            passage = torch.randint(target.config.vocab_size, (prompt_length // 2 + 1,), generator=stream).tolist()
            *prompt, last = (passage * 2)[: prompt_length + 1]
            self._texts.append(TokenSequence(prompt, capacity, target.device, self._caches[row].company))
            last_tokens.append(last)
        self._all(lambda row: drafter.prefill(self._texts[row], self._caches[row]))
        for text, cache, last in zip(self._texts, self._caches, last_tokens, strict=True):
            cache.length = text.length
            text.append([last])

    def sweep(self, controllers: Sequence[Controller] = ()) -> list[_Timed]:
        """Time a round of every controller, or of every width, from the same state, with plain steps between them."""
        controllers = controllers or [*map(Controller, self._widths), Looking(self._widths[-1])]
        plain = [self._plain_step()]
        rounds = []
        for controller in controllers:
            rounds.append(self._round(controller))
            plain.append(self._plain_step())
        beside = [(before + after) / 2 for before, after in pairwise(plain)]
        return [
            _Timed(*each, seconds, looks=controller.looks_at_drafts)
            for controller, each, seconds in zip(controllers, rounds, beside, strict=True)
        ]

    def _plain_step(self) -> float:
        def step(row: int) -> None:
            text, cache = self._texts[row], self._caches[row]
            token_ids = text.span(cache.length, text.length)
            outputs = self._target.run(self._target.whole, token_ids, cache, cache.length, last_only=True)
            text.read(self._greedy.choose(text, outputs))

        return self._watch.time(lambda: self._all(step))

    def _round(self, controller: Controller) -> tuple[int, float, float]:
        """Return the drafted tokens and the seconds of drafting and of verifying; the sequences stay unchanged."""

        def propose(row: int) -> Proposal:
            text, cache = self._texts[row], self._caches[row]
            return self._drafter.draft(text, cache, controller, Shaping(), Greedy(), controller.max_tokens)

        def verify(row: int) -> None:
            text, cache, draft = self._texts[row], self._caches[row], drafts[row]
            text.read(self._greedy.judge(text, draft, self._drafter.verify(text, cache, draft)))
            cache.roll_back(text.length - 1)

        start = self._watch.now()
        drafts = self._all(propose)
        drafted_at = self._watch.now()
        self._all(verify)
        return max(draft.num_tokens for draft in drafts), drafted_at - start, self._watch.now() - drafted_at

    def _all(self, task: Callable[[int], T]) -> list[T]:
        """Run a task for every row in lockstep and return its results by row."""
        done: dict[int, T] = {}

        def do(row: int) -> None:
            done[row] = task(row)

        self._lockstep.run_to_end([partial(do, row) for row in range(len(self._texts))])
        return [done[row] for row in range(len(self._texts))]


def _costs(sweeps: list[list[_Timed]]) -> RoundCosts:
    looking = [each for sweep in sweeps for each in sweep if each.looks]
    rounds = [each for sweep in sweeps for each in sweep if not each.looks]
    draft = _medians((each.num_drafted, _ratio(each.draft, each.plain)) for each in rounds)
    verify = _medians((each.num_drafted, _ratio(each.verify, each.plain)) for each in rounds)
    longest = max(draft)
    if not longest:
        raise ValueError(
            "not a single token was drafted: the drafter proposes none, or the context has no room for one"
        )
    step = draft[longest] / longest
    extra = {width: verify[width] + max(draft[width] - width * step, 0.0) for width in verify}
    looked = statistics.median(_ratio(each.draft, each.plain) for each in looking) / longest
    return RoundCosts(
        draft_step=_cost(step),
        look=round(max(looked - step, 0.0), 4),
        verify=tuple(map(_cost, _interpolated(_rising(extra)))),
    )


def _medians(values: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return the median of each width's values, by ascending width."""
    by_width: dict[int, list[float]] = {}
    for width, value in values:
        by_width.setdefault(width, []).append(value)
    return {width: statistics.median(by_width[width]) for width in sorted(by_width)}


def _ratio(seconds: float, plain: float) -> float:
    return seconds / plain if plain else 1.0  # a clock that stands still tells nothing apart


def _rising(values: dict[int, float]) -> dict[int, float]:
    """Return costs that rise with the width: a pass slower than a wider one was disturbed."""
    return {width: min(value for wider, value in values.items() if wider >= width) for width in values}


def _interpolated(at: dict[int, float]) -> list[float]:
    """Return values at 0, 1, 2 ... up to the last width, linearly interpolated."""
    values = [at[0]]
    for low, high in pairwise(at):
        slope = (at[high] - at[low]) / (high - low)
        values += [at[low] + slope * (width - low) for width in range(low + 1, high + 1)]
    return values


def _cost(ratio: float) -> float:
    """Return a cost rounded to four decimals and no smaller than `LEAST_COST`."""
    return max(round(ratio, 4), LEAST_COST)
