"""Copies by suffix matches: their length, and earlier answers as a second source."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from decoding.drafts.copies import SuffixCopies
from decoding.drafts.history import RequestHistory


def copies_of(tokens: Sequence[int], history: RequestHistory | None = None, **settings: Any) -> SuffixCopies:
    defaults: dict[str, Any] = {"min_match": 1, "max_spec_factor": 64, "min_token_prob": 0.0}
    return SuffixCopies(tokens, **{**defaults, **settings}, history=history)


def history_of(*answers: Sequence[int]) -> RequestHistory:
    history = RequestHistory()
    for answer in answers:
        history.add(answer)
    return history


@pytest.mark.parametrize(("factor", "expected"), [(0.2, 1), (1.0, 2), (1.5, 3), (2.0, 4), (64, 5)])
def test_length_follows_the_length_of_the_match(factor: float, expected: int) -> None:
    found = copies_of([1, 2, 3, 4, 5, 6, 1, 2], max_spec_factor=factor).copy(5)
    assert found == [3, 4, 5, 6, 1][:expected]


@pytest.mark.parametrize(("tokens", "least"), [([1, 2, 3], 1), ([1, 2, 3, 1], 2), ([5], 1), ([], 1)])
def test_nothing_is_copied_without_a_match(tokens: list[int], least: int) -> None:
    assert copies_of(tokens, min_match=least).copy(4) is None


def test_a_copy_of_few_tokens_begins_a_copy_of_more() -> None:
    stream = random.Random(3)
    tokens = [stream.randrange(4) for _ in range(300)]
    growing: list[int] = []
    copies = copies_of(growing, max_spec_factor=2, min_token_prob=0.2)
    for token in tokens:
        growing.append(token)
        longest = copies.copy(16)
        for number in (1, 3, 8):
            assert copies.copy(number) == (longest and longest[:number])


def test_index_that_grows_finds_what_a_fresh_one_finds() -> None:
    stream = random.Random(1)
    history = history_of([3, 1, 2, 0, 1], [1, 1, 2, 2])
    growing: list[int] = []
    copies = copies_of(growing, history, max_spec_factor=2)
    for _ in range(100):
        growing += [stream.randrange(4) for _ in range(stream.randrange(4))]
        if stream.random() < 0.7:
            assert copies.copy(6) == copies_of(growing, history, max_spec_factor=2).copy(6)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([[7, 8, 2, 3, 60, 61]], [60, 61]),  # a longer match than in the sequence itself
        ([[3, 60, 61]], [4, 9]),  # a match of equal length: the sequence comes first
        ([[5, 5]], [4, 9]),
        ([], [4, 9]),
    ],
)
def test_longest_match_counts_and_the_sequence_comes_first(answers: list[list[int]], expected: list[int]) -> None:
    assert copies_of([0, 3, 4, 9, 8, 2, 3], history_of(*answers)).copy(2) == expected


def test_answers_added_later_are_read_by_later_sequences_only() -> None:
    history = history_of()
    early = copies_of([1, 2], history)
    history.add([1, 2, 3])
    assert early.copy(3) is None
    assert copies_of([1, 2], history).copy(3) == [3]


def test_answer_that_was_copied_from_is_used() -> None:
    history = RequestHistory(max_answers=2)
    history.add([1, 2, 3])
    history.add([4, 5, 6])
    assert copies_of([1, 2], history).copy(1) == [3]
    history.add([7, 8, 9])
    assert [answer for answer, _ in history.answers()] == [(1, 2, 3), (7, 8, 9)]
