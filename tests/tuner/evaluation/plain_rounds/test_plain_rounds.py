"""Plain rounds of a server with a profile beside a server without one."""

from __future__ import annotations

import pytest

from decoding.arms.arm import Arm
from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.text import Ending
from tests.support.tiny import tiny_target
from tuner.evaluation.plain_rounds.run import WITH, WITHOUT, compare
from tuner.progress import Unwatched


def test_both_ways_write_the_same_text_and_every_round_is_kept() -> None:
    decoder = Decoder(tiny_target(), LayerSkip.blocks((2, 3)), Fixed(max_tokens=3))
    requests = [Request([1 + index, 2, 3], Ending(6)) for index in range(3)]
    row = compare(Arm("skip", decoder), requests, 2, 2, Unwatched())
    assert row["num_different"] == 0
    assert {name: len(seconds) for name, seconds in row["seconds"].items()} == {WITHOUT: 2, WITH: 2}
    assert row["speed_with_over_without"]["value"] == pytest.approx(
        sum(row["seconds"][WITHOUT]) / sum(row["seconds"][WITH])
    )


def test_a_wrong_text_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(tiny_target(), LayerSkip.blocks((2, 3)), Fixed(max_tokens=3))
    texts = iter([[[1]], [[1]], [[1]], [[2]], [[1]], [[1]]])
    monkeypatch.setattr("tuner.evaluation.plain_rounds.run.decode_side_by_side", lambda *_: (1.0, next(texts)))
    row = compare(Arm("skip", decoder), [Request([1], Ending(1))], 1, 2, Unwatched())
    assert row["num_different"] == 1
