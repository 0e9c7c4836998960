"""Clocks: real seconds from the start of a decoding, or the prices of its rounds."""

from __future__ import annotations

import time

import pytest
import torch

from decoding.drafts import LayerSkip, PlainDecoding
from decoding.rounds import Round
from tuner.measuring.contender import PriceList, WallClock


def a_round(num_drafted: int) -> Round:
    return Round((1,), num_drafted, 0, seconds=9.0, draft_seconds=9.0)


def test_wall_clock_counts_from_the_start_of_a_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.5, 14.0, 20.0, 21.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    clock = WallClock(torch.device("cpu"))
    elapsed = clock.start()
    assert (elapsed(None), elapsed(a_round(3))) == (1.5, 4.0)
    assert clock.start(PlainDecoding())(None) == 1.0, "each decoding from its own start"


def test_prices_add_up_over_the_rounds_of_a_decoding() -> None:
    clock = PriceList(lambda draft, record: 2.0 * record.num_drafted)
    elapsed, other = clock.start(LayerSkip.blocks((1,))), clock.start(LayerSkip.blocks((1,)))
    assert [elapsed(None), elapsed(a_round(3)), elapsed(a_round(1))] == [0.0, 6.0, 8.0]
    assert other(a_round(1)) == 2.0, "decodings are charged apart"


def test_price_list_needs_a_draft() -> None:
    with pytest.raises(ValueError, match="rounds of a draft"):
        PriceList(lambda draft, record: 1.0).start()
