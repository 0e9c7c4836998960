"""Benches for tests: the prompts of a list on a target, with the clock of choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from decoding.drafts import Draft
from decoding.rounds import Round
from decoding.target import Target
from decoding.text import Ending
from tuner.measuring.baseline import decode_baseline
from tuner.measuring.clock import Elapsed, PriceList
from tuner.measuring.paired import Bench


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
