"""The index of n-grams: the latest occurrence, read once, of a list that grows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from decoding.ngrams import NgramIndex


def found(token_ids: Sequence[int], length: int) -> int | None:
    return NgramIndex(token_ids, length).find_last()


@pytest.mark.parametrize(
    ("token_ids", "length", "place"),
    [
        ([1, 2, 3, 1], 1, 1),
        ([1, 2, 1, 3, 1], 1, 3),  # the latest of two
        ([1, 2, 9, 1, 2, 8, 1, 2], 2, 5),
        ([1, 2, 3], 1, None),
        ([2, 1, 3, 1, 2], 2, None),  # 1, 2 ends it and stands nowhere else
        ([7, 7], 1, 1),  # what is found may lie right before the end
        ([7, 7, 7], 2, 2),  # and overlap it
        ([7, 7], 2, None),
        ([7], 2, None),  # shorter than the n-gram
        ([7], 1, None),
    ],
)
def test_place_is_behind_the_latest_earlier_occurrence(token_ids: list[int], length: int, place: int | None) -> None:
    assert found(token_ids, length) == place


def test_index_that_grows_finds_what_a_fresh_one_finds() -> None:
    stream = random.Random(0)
    token_ids: list[int] = []
    indices = {length: NgramIndex(token_ids, length) for length in (1, 2, 3)}
    places = set()
    for _ in range(200):
        token_ids += [stream.randrange(5) for _ in range(stream.randrange(4))]
        for length, index in indices.items():
            if stream.random() < 0.7:  # not every one is asked every time
                places.add(place := index.find_last())
                assert place == found(token_ids, length)
                assert index.find_last() == place
    assert len(places) > 50


def test_every_token_is_read_once() -> None:
    class Counting(list[int]):
        slices = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
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


def test_ngram_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="an n-gram has at least one token, got 0"):
        NgramIndex([1, 2], 0)
