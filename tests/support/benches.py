"""Benches for tests: the prompts of a list on a target, with the clock of choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from decoding.drafts import Draft, LayerSkip
from decoding.rounds import Round
from decoding.target import Target
from decoding.text import Ending
from studies.contract import Candidate
from studies.measurement import Measurement, PromptSample
from tests.support.records import sample
from tuner.measuring.baseline import decode_baseline
from tuner.measuring.contender import Elapsed, PriceList
from tuner.measuring.paired import Bench
from tuner.measuring.turns import OnSample


def bench_on(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 16,
    eos_token_ids: frozenset[int] = frozenset(),
    batch_size: int = 1,
    **settings: Any,
) -> Bench:
    """Decode the prompts plainly and return their bench; `settings` are the bench's own."""
    ending = Ending(max_new_tokens, eos_token_ids)
    return Bench(target, decode_baseline(target, prompts, ending, batch_size=batch_size), **settings)


class LoggingClock:
    """Notes the draft of every decoding, in order, and charges what `prices` does."""

    def __init__(self, prices: PriceList, *, is_deterministic: bool = False) -> None:
        self.is_deterministic = is_deterministic
        self.drafts: list[Draft | None] = []
        self._prices = prices

    def start(self, draft: Draft | None = None) -> Elapsed:
        """See `Clock.start`."""
        self.drafts.append(draft)
        return self._prices.start(draft)


def per_token(*, plain: float = 1.0, drafted: float = 1.0) -> PriceList:
    """Return prices of these seconds per token, for plain decoding and for everything that drafts."""

    def price(draft: Draft, record: Round) -> float:
        return (drafted if draft.drafts else plain) * len(record.tokens)

    return PriceList(price)


def charge(monkeypatch: pytest.MonkeyPatch, prices: PriceList) -> None:
    """Let every bench of a search charge these prices in place of real seconds."""
    monkeypatch.setattr("tuner.search.task.WallClock", lambda device: prices)


Answer = Callable[[Candidate, int], PromptSample]
"""Makes the sample of a candidate at an index."""


class ScriptedBench:
    """Answers with made-up samples in place of decoding, and notes every request."""

    def __init__(self, answer: Answer, num_prompts: int = 8) -> None:
        self._answer = answer
        self.indices = range(num_prompts)
        self.measured: list[tuple[Candidate, tuple[int, ...]]] = []
        self.warmed_up_on: list[tuple[int, ...]] = []

    def measure(
        self, candidate: Candidate, indices: Sequence[int], on_sample: OnSample = lambda sample: None
    ) -> Measurement:
        """See `Measuring.measure`."""
        self.measured.append((candidate, tuple(indices)))
        samples = []
        for index in indices:
            samples.append(self._answer(candidate, index))
            on_sample(samples[-1])
        return Measurement(samples=tuple(samples))

    def side_by_side(
        self, candidates: Sequence[Candidate], indices: Sequence[int], on_sample: OnSample = lambda sample: None
    ) -> list[Measurement]:
        """See `Measuring.side_by_side`."""
        return [self.measure(each, indices, on_sample) for each in candidates]

    def warm_up_rule(self, candidate: Candidate, indices: Sequence[int]) -> Candidate:
        """Mark the rule as warmed up by making it persistent."""
        self.warmed_up_on.append(tuple(indices))
        return candidate.with_rule(candidate.draft_length.model_copy(update={"persistent": True}))

    @property
    def blocks_measured(self) -> list[tuple[int, tuple[int, ...]]]:
        """First skipped block and indices of every measurement."""
        return [(first_block(candidate), indices) for candidate, indices in self.measured]


def first_block(candidate: Candidate) -> int:
    """Return the first block that a candidate skips, by which made-up speed-ups tell candidates apart."""
    assert isinstance(candidate.draft, LayerSkip)
    return candidate.draft.skip_attention[0]


def noisy(true: float = 1.0, noise: float = 0.05, seed: int = 0) -> Answer:
    """Answer that every candidate is `true` times as fast as plain decoding, with log-normal noise."""
    stream = np.random.default_rng(seed)
    return lambda candidate, index: sample(true * float(np.exp(stream.normal(0, noise))), index)
