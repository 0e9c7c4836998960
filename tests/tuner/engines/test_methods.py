"""What engines' own lookups copy, as their sources say, and the rounds of a text by replay."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from tuner.engines.methods import CopySource, EarliestMatch, LatestMatch, Replay, find


def _copied(lookup: CopySource, text: Sequence[int], most: int) -> list[int]:
    start = lookup.start(array("i", text))
    return [] if start is None else list(text[start : start + lookup.count(start, len(text), most)])


@pytest.mark.parametrize(
    ("longest", "shortest", "text", "copied"),
    [
        (2, 1, (1, 2, 3, 4, 1, 2, 5, 1, 2), [3, 4]),  # the longest n-gram, at its earliest position
        (3, 3, (1, 2, 3, 4, 1, 2, 5, 1, 2), []),
        (3, 1, (9, 2, 7, 8, 1, 2), [7, 8]),  # a shorter one where the longer ones do not match
        (2, 1, (5, 5, 5), [5]),  # a match may overlap what is matched
        (2, 2, (1,), []),
        (1, 1, (1, 1), [1]),
    ],
)
def test_vllm_copies_after_the_earliest_of_the_longest_matches(
    longest: int, shortest: int, text: tuple[int, ...], copied: list[int]
) -> None:
    assert _copied(EarliestMatch(longest, shortest), text, 2) == copied


@pytest.mark.parametrize(
    ("size", "text", "most", "copied"),
    [
        (1, (0, 2, 8, 9, 2, 3, 4, 2), 2, [3, 4]),  # the latest match
        (1, (0, 2, 8, 9, 7, 2, 4, 2), 3, [4]),  # the last token is not copied
        (2, (0, 1, 2, 3, 4, 5, 6, 1, 2), 3, [3, 4, 5]),
        (2, (0, 4, 5, 1, 2, 3, 1, 2), 2, [3, 1]),
        (2, (0, 7, 4, 5, 1, 2, 1, 1, 2), 1, []),  # fewer tokens than the n-gram has
        (2, (1, 2, 3, 4, 5, 6, 7, 1, 2), 3, []),  # a match at the first position is none
        (1, (0, 2, 3, 2), 2, []),  # a text too short for a whole copy
    ],
)
def test_llama_cpp_copies_after_the_latest_match(
    size: int, text: tuple[int, ...], most: int, copied: list[int]
) -> None:
    assert _copied(LatestMatch(size), text, most) == copied


def test_a_match_within_the_bytes_of_a_token_is_none() -> None:
    text, wanted = array("i", [0x00010000, 0, 1]), array("i", [1])
    assert find(text, wanted) == 2
    assert find(array("i", [1, 0x00010000]), wanted, last=True) == 0
    assert find(array("i", [0x00000100]), wanted) is None


def test_the_rounds_of_a_text_are_those_of_decoding_it() -> None:
    """After the prefill's token: 1 2 3 is drafted and right up to 9, then nothing is drafted, then 9 1 is drafted and wrong."""
    replay = Replay((7, 8, 1, 2, 3, 4, 7), (8, 1, 2, 9, 5, 9, 9))
    rounds = replay.rounds(EarliestMatch(2, 1), 3)
    # 8 -> 1 2 3 drafted, 1 2 accepted and 9 written; 9 new: 5 written; 5 new: 9 written; 9 -> 5 9 9 ...
    assert rounds.count == 4
    assert rounds.drafted == 3 + 0 + 0 + 2
    assert replay.rounds(EarliestMatch(2, 1), 1).count == 5


def test_a_longer_limit_never_takes_more_rounds_where_everything_repeats() -> None:
    replay = Replay((1, 2, 3) * 4, (1, 2, 3) * 8)
    counts = [replay.rounds(EarliestMatch(3, 1), most).count for most in (1, 2, 4, 8)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 3, "23 tokens after the prefill's, nine in a round"
