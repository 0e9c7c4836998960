"""The store of earlier answers: its bounds, what goes first, and threads."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from decoding.drafts.copies import SuffixCopies
from decoding.drafts.history import RequestHistory


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


@pytest.mark.parametrize("bounds", [{"max_tokens": 0}, {"max_answers": 0}])
def test_bounds_below_one_are_refused(bounds: dict[str, int]) -> None:
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
