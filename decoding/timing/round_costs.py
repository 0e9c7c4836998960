"""Costs of decoding rounds on the device at hand: a short benchmark of any drafter, in plain passes.

A rule that weighs costs has them from the profile, or they are measured here before a decoder is built. The search predicts the
same costs for drafts that it has not run: `studies.costs`, from passes that `decoding.timing.passes` times too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from decoding.decode import judge
from decoding.draft_length import Controller, CostAwareRule, DraftLengthRule, Looking, RoundCosts
from decoding.drafters.build import build_drafter
from decoding.drafters.contract import Drafter, Proposal
from decoding.drafters.prompt_lookup import steered_part
from decoding.drafts import Draft
from decoding.head_folder import HeadFolder
from decoding.lockstep import shared_batch_size
from decoding.profile import Decoding
from decoding.target import Target
from decoding.text import Ending, Request
from decoding.timing.passes import Prompted, PromptedBatch, between_plain

# Costs bend at the first few tokens and at powers of two; in between, a straight line does.
WIDTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FEWEST_SWEEPS, MOST_SWEEPS = 5, 20
LEAST_COST = 1e-4  # of a plain pass: what a pass is taken to cost that was too short for the clock


def with_measured_costs(
    target: Target, draft: Draft, rule: DraftLengthRule, decoding: Decoding, *, heads: HeadFolder | None = None
) -> DraftLengthRule:
    """Return `rule` ready for a `Decoder`: with costs measured here if it weighs costs and has none.

    Raises `ExitHeadError` for a missing or wrong head.
    """
    if not isinstance(rule, CostAwareRule) or rule.costs is not None:
        return rule
    drafter = build_drafter(target, draft, decoding, heads=heads)
    return rule if drafter is None else rule.with_costs(measure_round_costs(target, drafter, rule.max_tokens))


@torch.inference_mode()
def measure_round_costs(
    target: Target,
    drafter: Drafter,
    max_tokens: int,
    *,
    num_sequences: int = 1,
    prompt_length: int = 64,
    budget_seconds: float = 0.8,
) -> RoundCosts:
    """Time plain passes, drafts and verifications of up to `max_tokens` tokens after a random prompt.

    The prompt repeats one passage, so that a drafter that copies has something to copy. A lookup that is tried before another
    drafter is not measured, because no rule steers it.

    A sweep times a round of each of `WIDTHS`. There are at least five sweeps, and more until `budget_seconds` are spent. The cost
    of a width is the median over sweeps of its seconds over the seconds of the adjacent plain steps. The extra time of a draft's
    first step counts to the verification. Other lengths are interpolated. The longest draft is timed again with a rule that looks
    at every token.

    With `num_sequences` above 1 all passes are over a batch of that size in lockstep (`decoding.lockstep`), each sequence after its
    own prompt; sequences that cannot share passes (`Target.unbatchable_reason`) cost what one does.

    Where the context is short, the prompt is shortened first, then the drafts.

    Raises ValueError if `max_tokens`, `num_sequences` or `prompt_length` is below 1, or if no token was drafted.
    """
    for name, value in {
        "max_tokens": max_tokens,
        "num_sequences": num_sequences,
        "prompt_length": prompt_length,
    }.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    start = time.perf_counter()
    num_sequences = shared_batch_size(target, num_sequences)
    bench = _RoundBench(target, steered_part(drafter), max_tokens, prompt_length, num_sequences)
    if target.runner.buckets is not None:
        bench.sweep()  # a first pass of a fixed shape makes it ready
        start = time.perf_counter()
    sweeps = [bench.sweep() for _ in range(FEWEST_SWEEPS)]
    while time.perf_counter() - start < budget_seconds and len(sweeps) < MOST_SWEEPS:
        sweeps.append(bench.sweep())
    return _costs(sweeps)


@dataclass(frozen=True)
class _Timed:
    """Seconds of one round, and of the plain steps before and after it."""

    num_drafted: int
    draft: float
    verify: float
    plain: float
    looks: bool


class _RoundBench:
    """Rounds of a drafter after prompts that it has read."""

    def __init__(
        self, target: Target, drafter: Drafter, max_tokens: int, prompt_length: int, num_sequences: int
    ) -> None:
        self._target, self._drafter = target, drafter
        room = target.context_length or prompt_length + 1 + max_tokens
        prompt_length = max(min(prompt_length, room - 1 - max_tokens), 1)
        longest = max(min(max_tokens, room - 1 - prompt_length), 0)
        self._controllers: Sequence[Controller] = [
            *(Controller(width) for width in WIDTHS if width < longest),
            Controller(longest),
            Looking(longest),
        ]
        self._greedy = Request([0], Ending(longest + 1))
        stream, texts = torch.Generator().manual_seed(0), []
        for _ in range(num_sequences):
            passage = torch.randint(target.config.vocab_size, (prompt_length // 2 + 1,), generator=stream).tolist()
            texts.append((passage * 2)[: prompt_length + 1])
        capacity = prompt_length + 1 + longest
        self._batch = PromptedBatch(target, texts, prompt_length, capacity, drafter.prefill)

    def sweep(self) -> list[_Timed]:
        """Time a round of every controller from the same state."""
        rounds = between_plain(self._plain_seconds, [partial(self._round, each) for each in self._controllers])
        return [
            _Timed(*seconds, plain, controller.looks_at_drafts)
            for controller, (seconds, plain) in zip(self._controllers, rounds, strict=True)
        ]

    def _plain_seconds(self) -> float:
        def step(sequence: Prompted) -> None:
            text, cache = sequence.text, sequence.cache
            outputs = self._target.run(self._target.whole, sequence.ahead(1), cache, cache.length, last_only=True)
            text.read(self._greedy.choose(text, outputs))

        return self._batch.seconds(step)

    def _round(self, controller: Controller) -> tuple[int, float, float]:
        """Return the drafted tokens and the seconds of drafting and of verifying; the sequences stay unchanged."""

        def propose(sequence: Prompted) -> Proposal:
            return self._drafter.draft(sequence.text, sequence.cache, controller, self._greedy, controller.max_tokens)

        def verify(sequence: Prompted) -> None:
            text, cache, draft = sequence.text, sequence.cache, drafts[sequence]
            text.read(judge(self._greedy, text, draft, self._drafter.verify(text, cache, draft)))
            cache.roll_back(text.length - 1)

        watch, sequences = self._batch.watch, self._batch.sequences
        start = watch.now()
        drafts = dict(zip(sequences, self._batch.all(propose), strict=True))
        drafted_at = watch.now()
        self._batch.all(verify)
        return max(draft.num_tokens for draft in drafts.values()), drafted_at - start, watch.now() - drafted_at


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
