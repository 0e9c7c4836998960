"""Lookups replayed on plain texts, and the prices that measured ones give."""

from __future__ import annotations

import random

import pytest

from studies.measurement import Measurement, PromptSample
from tuner.engines.lookup_replay import LookupCounts, LookupPrices, lookup_prices, replay_lookup


def test_a_round_copies_what_followed_the_latest_match_and_accepts_what_the_text_continues_with() -> None:
    # After the prompt's own first token, 3, the bigram (2, 3) is found: 4 is right, 5 is not.
    text = ((1, 2, 3, 4, 5, 9, 2), (3, 4, 6, 7, 8))
    assert replay_lookup([text], ngram=2, most=2) == LookupCounts(decoded=4, rounds=1, drafted=2, accepted=1)
    assert replay_lookup([text], ngram=4, most=4) == LookupCounts(decoded=4)


def test_a_copy_leaves_room_for_the_target_and_ends_with_the_known_tokens() -> None:
    text = ((5, 6, 5), (6, 5, 6, 5))
    # Known is 5 6 5 6; two tokens follow the earlier (5, 6), and room is for two of three.
    assert replay_lookup([text], ngram=2, most=8) == LookupCounts(decoded=3, rounds=1, drafted=2, accepted=2)


def test_counts_are_those_of_a_plain_loop_over_all_matches() -> None:
    rng = random.Random(0)
    for _ in range(30):
        tokens = [rng.randrange(3) for _ in range(40)]
        ngram, most, at = rng.randint(1, 3), rng.randint(1, 5), 11
        rounds = drafted = accepted = 0
        while at < 40:
            ends = [end for end in range(ngram, at) if tokens[end - ngram : end] == tokens[at - ngram : at]]
            copy = tokens[ends[-1] : at][: min(most, 40 - at - 1)] if ends else []
            right = next((n for n, token in enumerate(copy) if token != tokens[at + n]), len(copy))
            rounds, drafted, accepted = rounds + bool(copy), drafted + len(copy), accepted + right
            at += right + 1
        counts = replay_lookup([(tokens[:10], tokens[10:])], ngram=ngram, most=most)
        assert counts == LookupCounts(29, rounds, drafted, accepted)


def sample(prices: LookupPrices, rounds: int, drafted: int, accepted: int) -> PromptSample:
    passes = 30 - accepted + prices.per_round * rounds + prices.per_token * drafted
    return PromptSample(
        prompt=0,
        plain_seconds=6.2,
        plain_tokens=31,
        draft_seconds=0.2 * passes,
        draft_tokens=30,
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        identical=True,
    )


def test_prices_are_found_from_measured_lookups_of_two_lengths() -> None:
    planted = LookupPrices(per_round=0.7, per_token=0.2)
    measured = [
        Measurement(samples=(sample(planted, 5, 20, 9), sample(planted, 4, 30, 10))),
        Measurement(samples=(sample(planted, 0, 0, 0),)),
    ]
    found = lookup_prices(measured)
    assert found is not None
    assert (found.per_round, found.per_token) == pytest.approx((0.7, 0.2))
    assert found.speedup(LookupCounts(30, 5, 20, 9)) == pytest.approx(30 / (21 + 3.5 + 4.0))


def test_there_are_no_prices_where_nothing_was_drafted() -> None:
    nothing = Measurement(samples=(sample(LookupPrices(1.0, 1.0), 0, 0, 0),))
    assert lookup_prices([nothing]) is None
    assert lookup_prices([]) is None
