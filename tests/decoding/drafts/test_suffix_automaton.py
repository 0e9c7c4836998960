"""The suffix automaton against a search through all earlier occurrences."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from decoding.drafts.suffix_automaton import MOST_COUNTED, ROOT, SuffixAutomaton


def automaton_of(tokens: Sequence[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in tokens:
        automaton.extend(token)
    return automaton


def random_tokens(seed: int, length: int = 60) -> list[int]:
    stream = random.Random(seed)
    return [stream.randrange(2 + seed % 5) for _ in range(length)]


def ends_of(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """Return the positions after each occurrence of `part`."""
    return [end for end in range(len(part), len(text) + 1) if list(text[end - len(part) : end]) == list(part)]


def longest_repeated(text: Sequence[int]) -> int:
    """Return the length of the longest suffix that also occurs earlier."""
    return max(size for size in range(len(text)) if size == 0 or len(ends_of(text, text[-size:])) > 1)


def next_token(text: Sequence[int], size: int) -> int:
    """Return the most frequent token after the last `size` tokens; the latest among equals."""
    ends = [end for end in ends_of(text, text[len(text) - size :]) if end < len(text)]
    counts = Counter(text[end] for end in ends)
    return max(counts, key=lambda token: (counts[token], max(end for end in ends if text[end] == token)))


def test_match_and_continuation_are_those_of_a_search_through_the_text() -> None:
    for seed in range(10):
        tokens = random_tokens(seed)
        automaton = SuffixAutomaton()
        for number, token in enumerate(tokens, 1):
            automaton.extend(token)
            text = tokens[:number]
            state, length = automaton.repeated()
            assert length == longest_repeated(text)
            if length:
                found = automaton.continuation(state, 1, min_match=1, min_token_prob=0.0)
                assert found == [next_token(text, length)]


def test_match_in_another_text_is_its_longest_suffix_there() -> None:
    for seed in range(5):
        known, read = random_tokens(seed), random_tokens(seed + 50)
        automaton = automaton_of(known)
        state, length = ROOT, 0
        for number, token in enumerate(read, 1):
            state, length = automaton.step(state, length, token)
            sizes = [size for size in range(1, number + 1) if ends_of(known, read[number - size : number])]
            assert length == max(sizes, default=0)


def test_most_frequent_continuation_counts_and_of_those_the_latest() -> None:
    often = automaton_of([1, 5, 1, 5, 1, 6, 1])
    assert often.continuation(often.repeated()[0], 1, min_match=1, min_token_prob=0.0) == [5]
    equal = automaton_of([1, 5, 1, 6, 1])
    assert equal.continuation(equal.repeated()[0], 1, min_match=1, min_token_prob=0.0) == [6]


def test_copy_ends_where_its_estimated_probability_is_too_low() -> None:
    for least, expected in ((0.3, [5, 1, 6]), (0.4, [5, 1]), (0.6, [5, 1]), (0.7, [])):
        automaton = automaton_of(
            [1, 5, 1, 5, 1, 6, 1]
        )  # 5 follows 1 in two of three cases, 6 follows 5, 1 in one of two
        assert automaton.continuation(automaton.repeated()[0], 3, min_match=1, min_token_prob=least) == expected


def test_loop_is_continued_to_the_full_length() -> None:
    automaton = automaton_of([9, 1, 2, 3, 1, 2, 3])
    assert automaton.continuation(automaton.repeated()[0], 8, min_match=1, min_token_prob=0.0) == [
        1,
        2,
        3,
        1,
        2,
        3,
        1,
        2,
    ]


def test_copy_goes_on_only_after_matches_that_are_long_enough() -> None:
    automaton = automaton_of([1, 2, 8, 9, 1, 2])
    state, length = automaton.repeated()
    assert length == 2
    assert automaton.continuation(state, 9, min_match=3, min_token_prob=0.0) == []


def test_memory_and_work_of_a_token_are_bounded() -> None:
    """A loop is the worst case: every suffix occurs again with every token."""
    for tokens in ([7] * 3000, [1, 2, 3] * 1000, random_tokens(4, 3000)):
        automaton = automaton_of(tokens)
        assert len(automaton._next) <= 2 * len(tokens)
    loop = automaton_of([7] * 3000)
    before = list(loop._count)
    loop.extend(7)
    changed = sum(one != other for one, other in zip(before, loop._count, strict=False))
    assert changed <= MOST_COUNTED


def test_share_of_a_token_is_that_of_all_that_followed() -> None:
    """The last occurrence has no next token yet, and does not count."""
    for seed in range(10):
        tokens = random_tokens(seed)
        for number in range(2, len(tokens)):
            text = tokens[:number]
            automaton = automaton_of(text)
            state, length = automaton.repeated()
            if length:
                following = Counter(text[end] for end in ends_of(text, text[-length:]) if end < len(text))
                _, _, share = automaton._most_frequent(state)
                assert share == max(following.values()) / following.total()
