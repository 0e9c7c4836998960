"""Rates and intervals derived from samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from studies.measurement import (
    BatchTexts,
    Measurement,
    PairedPrefill,
    PromptSample,
    geometric_means,
)
from studies.ratios import Ratio
from tests.support.records import measurement, sample


def test_speedup_weighs_every_prompt_by_its_seconds_per_token() -> None:
    # Plain 0.3 and 0.1 s a token, the candidate 0.1 on both: (0.3 + 0.1) / (0.1 + 0.1).
    assert measurement([3.0, 1.0]).speedup == pytest.approx(2.0)


def test_rates_are_over_all_prompts() -> None:
    both = Measurement(samples=(sample(2.0, 0), sample(1.0, 1, drafted=2, accepted=1, rounds=9)))
    assert both.plain_tokens_per_second == pytest.approx(20 / 3)
    assert both.draft_tokens_per_second == pytest.approx(10)
    assert both.draft_acceptance_rate == pytest.approx(9 / 12)
    assert both.tokens_per_round == pytest.approx(20 / 14)
    assert both.drafted_per_round == pytest.approx(12 / 14)


def test_the_interval_holds_the_value_and_is_the_same_for_the_same_samples() -> None:
    measured = measurement([1.1, 1.3, 1.2, 1.4, 0.9, 1.25])
    interval = measured.speedup_interval()
    assert interval.ci95[0] < interval.value < interval.ci95[1]
    assert interval == measured.speedup_interval()


def test_the_interval_covers_the_true_value_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        low, high = measurement(rng.lognormal(np.log(1.2), 0.15, size=24).tolist()).speedup_interval().ci95
        covered += low <= 1.2 * np.exp(0.15**2 / 2) <= high
    assert 370 <= covered <= 392, "95 % of 400 are 380"


def test_one_prompt_has_no_interval() -> None:
    with pytest.raises(ValueError, match="at least 2 prompts, got 1"):
        measurement([1.0]).speedup_interval()


def test_a_text_that_is_neither_identical_nor_a_tie_is_not_lossless() -> None:
    assert Measurement(samples=(sample(1.0), sample(1.0, identical=False, tie=True))).is_lossless
    assert not Measurement(samples=(sample(1.0), sample(1.0, identical=False))).is_lossless


def test_texts_of_different_length_weigh_by_their_tokens() -> None:
    short = sample(1.0, 0, plain_seconds=1.0, plain_tokens=8, draft_seconds=2.0, draft_tokens=8)
    long = sample(1.0, 1, plain_seconds=15.0, plain_tokens=120, draft_seconds=6.0, draft_tokens=120)
    measured = Measurement(samples=(short, long))
    assert measured.speedup == pytest.approx((1 + 15) / (2 + 6)), "the seconds that a user saves"
    assert measured.speedup == pytest.approx(measured.draft_tokens_per_second / measured.plain_tokens_per_second)
    assert measured.speedup_interval().value == pytest.approx(2.0)


def with_prefill(plain: float, draft: float, prompt: int, **facts: Any) -> PromptSample:
    prefill = PairedPrefill(plain_seconds=plain, plain_tokens=1, draft_seconds=draft, draft_tokens=1)
    return sample(2.0, prompt, prefill=prefill, **facts)


def test_end_to_end_counts_prefill_seconds_and_first_tokens() -> None:
    measured = Measurement(samples=(with_prefill(1.0, 1.5, 0), with_prefill(3.0, 3.5, 1)))
    whole = measured.end_to_end
    assert whole is not None
    assert measured.speedup == pytest.approx(2.0)
    assert whole.speedup_interval().value == pytest.approx((4 + 4) / (2 + 5))
    assert whole.plain.tokens_per_second == pytest.approx(22 / 8)
    assert (whole.plain_time_to_first_token_seconds, whole.time_to_first_token_seconds) == (2.0, 2.5)
    share = whole.prefill_over_plain()
    assert share is not None
    assert share.value == pytest.approx(5 / 4)


def test_samples_of_earlier_versions_have_no_figures_end_to_end() -> None:
    assert measurement([1.0, 2.0]).end_to_end is None
    assert Measurement(samples=(sample(1.0, 0), with_prefill(1.0, 1.0, 1))).end_to_end is None
    free = Measurement(samples=(with_prefill(0.0, 0.0, 0), with_prefill(0.0, 0.0, 1))).end_to_end
    assert free is not None
    assert free.prefill_over_plain() is None, "a price list does not charge for prefills"


def test_acceptance_is_counted_as_by_aiperf() -> None:
    # vLLM's example in AIPerf's documentation: accepted drafts of eight steps of four.
    lengths = (1, 1, 2, 3, 1)
    one = sample(1.0, rounds=8, drafted=32, accepted=18, accepted_lengths=lengths)
    measured = Measurement(samples=(one, one.model_copy(update={"prompt": 1})))
    assert measured.mean_acceptance_length == pytest.approx(3.25)
    assert measured.draft_acceptance_rate == pytest.approx(0.5625)
    assert measured.acceptance_histogram == {0: 2, 1: 2, 2: 4, 3: 6, 4: 2}
    assert measured.num_spec_steps == sum(measured.acceptance_histogram.values())
    assert Measurement(samples=(sample(1.0, rounds=0, drafted=0, accepted=0),)).mean_acceptance_length == 1.0


def test_categories_have_equal_weight_in_the_geometric_mean() -> None:
    speedups = {"qa": (4.0, 4.0, 4.0), "code": (1.0, 1.0)}
    samples = [sample(s, category=name) for name, of_name in speedups.items() for s in of_name]
    measured = Measurement(samples=(*samples, sample(9.0)))
    found = measured.by_category()
    assert {name: each.speedup for name, each in found.items()} == {"qa": 4.0, "code": 1.0}
    means = geometric_means(found)
    assert means is not None
    assert means[0].value == pytest.approx(2.0)
    assert means[0].ci95 == pytest.approx((2.0, 2.0))
    assert means[1] is None, "no sample has a prefill"
    assert geometric_means({**found, "one": Measurement(samples=(sample(1.0),))}) is None
    assert geometric_means({}) is None


def test_ratio_of_measurements_compares_seconds_per_token_on_same_prompts() -> None:
    # 20 tokens in 2 s against 30 in 10 s, whatever plain decoding took beside each.
    fast = Measurement(samples=(sample(1.0, 0), sample(3.0, 1))).draft_decode
    slow = Measurement(samples=(sample(5.0, 0, draft_seconds=2.0), sample(1.0, 1, draft_seconds=8.0, draft_tokens=20)))
    interval = Ratio.of_speeds(slow.draft_decode, fast).interval()
    assert interval.value == pytest.approx((20 / 2) / (30 / 10))
    # In logarithms: seconds weigh in with 0.4 and 1.6, tokens with 2/3 and 4/3, which leaves -4/15 and 4/15: a standard error
    # of 4/15; t is 12.706 there.
    reach = 12.7062 * 4 / 15
    assert np.log(interval.ci95) == pytest.approx(np.log(10 / 3) + np.array([-1.0, 1.0]) * reach, rel=1e-4)
    assert Ratio.of_speeds(fast, slow.draft_decode).interval().value == pytest.approx(3 / 10)


def test_texts_of_batches_are_counted_one_by_one() -> None:
    batches = [sample(1.2, 0, batch=BatchTexts(count=4, identical=4, ties=0))]
    batches += [sample(1.1, 1, identical=False, tie=True, batch=BatchTexts(count=4, identical=2, ties=2))]
    measured = Measurement(samples=tuple(batches))
    assert (measured.num_prompts, measured.num_identical, measured.num_ties, measured.batch_size) == (8, 6, 2, 4)
    assert measured.is_lossless


def test_a_sample_of_one_prompt_counts_as_one_sequence() -> None:
    stored = {
        **{"prompt": 3, "plain_seconds": 2.0, "plain_tokens": 10, "draft_seconds": 1.0, "draft_tokens": 10},
        **{"rounds": 5, "drafted": 10, "accepted": 8, "identical": False, "tie": True},
    }
    loaded = PromptSample.model_validate(stored)
    assert loaded.texts == BatchTexts(count=1, identical=0, ties=1)
    measured = Measurement(samples=(loaded, sample(1.0)))
    assert (measured.num_prompts, measured.num_identical, measured.num_ties, measured.batch_size) == (2, 1, 1, 1)
