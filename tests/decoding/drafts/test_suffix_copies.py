"""Copies by suffix matches: their length, and the bounded store of earlier answers as a second source."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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


def test_length_follows_the_length_of_the_match() -> None:
    for factor, expected in ((0.2, 1), (1.0, 2), (1.5, 3), (2.0, 4), (64, 5)):
        found = copies_of([1, 2, 3, 4, 5, 6, 1, 2], max_spec_factor=factor).copy(5)
        assert found == [3, 4, 5, 6, 1][:expected]


def test_nothing_is_copied_without_a_match() -> None:
    for tokens, least in (([1, 2, 3], 1), ([1, 2, 3, 1], 2), ([5], 1), ([], 1)):
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


def test_longest_match_counts_and_the_sequence_comes_first() -> None:
    cases: list[tuple[list[list[int]], list[int]]] = [
        ([[7, 8, 2, 3, 60, 61]], [60, 61]),  # a longer match than in the sequence itself
        ([[3, 60, 61]], [4, 9]),  # a match of equal length: the sequence comes first
        ([[5, 5]], [4, 9]),
        ([], [4, 9]),
    ]
    for answers, expected in cases:
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


def kept(history: RequestHistory) -> list[tuple[int, ...]]:
    return [answer for answer, _ in history.answers()]


def test_least_recently_used_answers_go_first() -> None:
    history = RequestHistory(max_tokens=6)
    for answer in ([1, 1], [2, 2], [3, 3], [1, 1], [4, 4]):  # the second [1, 1] is a use of the first
        history.add(answer)
    assert kept(history) == [(3, 3), (1, 1), (4, 4)]
    assert (history.num_tokens, history.num_answers) == (6, 3)


def test_bounds_hold_whatever_is_added() -> None:
    stream = random.Random(0)
    history = RequestHistory(max_tokens=100, max_answers=7)
    for _ in range(300):
        history.add([stream.randrange(9) for _ in range(stream.randrange(150))])
        assert history.num_tokens == sum(map(len, kept(history))) <= 100
        assert history.num_answers <= 7


def test_end_of_a_long_answer_is_kept() -> None:
    history = RequestHistory(max_tokens=3)
    history.add([1, 2, 3, 4, 5])
    assert kept(history) == [(3, 4, 5)]


def test_empty_answer_is_none_and_clear_forgets() -> None:
    history = RequestHistory()
    history.add([])
    assert history.num_answers == 0
    history.add([1])
    history.clear()
    assert (history.num_tokens, history.answers()) == (0, [])


def test_bounds_below_one_are_refused() -> None:
    for bounds in ({"max_tokens": 0}, {"max_answers": 0}):
        with pytest.raises(ValueError, match="a history holds at least one token of one answer"):
            RequestHistory(**bounds)


def test_threads_may_read_and_add_at_the_same_time() -> None:
    history = RequestHistory(max_tokens=400, max_answers=20)

    def request(seed: int) -> int:
        stream = random.Random(seed)
        text: list[int] = []
        copies = SuffixCopies(text, min_match=1, max_spec_factor=4, min_token_prob=0.0, history=history)
        for _ in range(60):
            text += (copies.copy(4) or [])[:2] or [stream.randrange(5)]
        history.add(text)
        return history.num_tokens

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(request, range(64))) <= 400
    assert history.num_tokens == sum(map(len, kept(history)))
