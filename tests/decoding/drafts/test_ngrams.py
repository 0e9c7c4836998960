"""The n-gram index of a growing list: latest occurrence, each token read once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from decoding.drafts.copies import NgramIndex


def found(token_ids: Sequence[int], length: int) -> int | None:
    return NgramIndex(token_ids, length).find_last()


def test_position_is_after_the_latest_earlier_occurrence() -> None:
    cases: list[tuple[list[int], int, int | None]] = [
        ([1, 2, 3, 1], 1, 1),
        ([1, 2, 1, 3, 1], 1, 3),  # the latest of two
        ([1, 2, 9, 1, 2, 8, 1, 2], 2, 5),
        ([1, 2, 3], 1, None),
        ([2, 1, 3, 1, 2], 2, None),  # 1, 2 ends it and occurs nowhere else
        ([7, 7], 1, 1),  # the match may be right before the end
        ([7, 7, 7], 2, 2),  # and overlap it
        ([7, 7], 2, None),
        ([7], 2, None),  # shorter than the n-gram
        ([7], 1, None),
    ]
    for token_ids, length, position in cases:
        assert found(token_ids, length) == position


def test_index_that_grows_finds_what_a_fresh_one_finds() -> None:
    stream = random.Random(0)
    token_ids: list[int] = []
    indices = {length: NgramIndex(token_ids, length) for length in (1, 2, 3)}
    positions = set()
    for _ in range(200):
        token_ids += [stream.randrange(5) for _ in range(stream.randrange(4))]
        for length, index in indices.items():
            if stream.random() < 0.7:  # not every index is queried every time
                positions.add(position := index.find_last())
                assert position == found(token_ids, length)
                assert index.find_last() == position
    assert len(positions) > 50


def test_every_token_is_read_once() -> None:
    class Counting(list[int]):
        slices = 0

        def __getitem__(self, key: Any) -> Any:
            self.slices += 1
            return super().__getitem__(key)

    token_ids = Counting(range(100))
    index = NgramIndex(token_ids, 3)
    index.update()
    assert token_ids.slices == 97
    for token in range(10):
        token_ids.append(token)
        index.find_last()
    assert token_ids.slices == 97 + 10 * 2  # the new n-gram, and the one that is looked up


def test_ngram_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="an n-gram has at least one token, got 0"):
        NgramIndex([1, 2], 0)
