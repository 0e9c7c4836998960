"""Rates and intervals derived from samples."""

from __future__ import annotations

import numpy as np
import pytest

from studies.measurement import BatchTexts, Measurement, PromptSample, pooled, ratio_interval
from tests.support.records import measurement, sample


def test_speedup_weighs_every_prompt_by_its_seconds_per_token() -> None:
    # Plain 0.3 and 0.1 s a token, the candidate 0.1 on both: (0.3 + 0.1) / (0.1 + 0.1).
    assert measurement([3.0, 1.0]).speedup == pytest.approx(2.0)


def test_seconds_are_per_token_so_texts_of_different_length_compare() -> None:
    long = sample(1.0, plain_seconds=4.0, plain_tokens=40, draft_seconds=1.0, draft_tokens=20)
    assert long.ratio == pytest.approx(2.0)


def test_rates_are_over_all_prompts() -> None:
    both = Measurement(samples=(sample(2.0, 0), sample(1.0, 1, drafted=2, accepted=1, rounds=9)))
    assert both.plain_tokens_per_second == pytest.approx(20 / 3)
    assert both.draft_tokens_per_second == pytest.approx(10)
    assert both.acceptance_rate == pytest.approx(9 / 12)
    assert both.tokens_per_round == pytest.approx(20 / 14)
    assert both.drafted_per_round == pytest.approx(12 / 14)


def test_nothing_drafted_means_no_acceptance() -> None:
    assert Measurement(samples=(sample(1.0, drafted=0, accepted=0),)).acceptance_rate == 0.0


def test_the_interval_holds_the_value_and_is_the_same_for_the_same_samples() -> None:
    measured = measurement([1.1, 1.3, 1.2, 1.4, 0.9, 1.25])
    interval = measured.speedup_interval()
    assert interval.ci95[0] < interval.value < interval.ci95[1]
    assert interval == measured.speedup_interval()


def test_equal_ratios_have_an_interval_of_no_width() -> None:
    assert measurement([1.5] * 4).speedup_interval().ci95 == pytest.approx((1.5, 1.5))


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


def test_pooling_keeps_every_sample() -> None:
    assert len(pooled([measurement([1.0, 2.0]), measurement([3.0])]).samples) == 3


def test_ratio_of_measurements_compares_seconds_per_token_on_same_prompts() -> None:
    # 0.1 s a token against 0.2 and 0.4, whatever plain decoding took beside each.
    fast = Measurement(samples=(sample(1.0, 0), sample(3.0, 1)))
    slow = Measurement(samples=(sample(5.0, 0, draft_seconds=2.0), sample(1.0, 1, draft_seconds=8.0, draft_tokens=20)))
    interval = ratio_interval(fast, slow)
    assert interval.value == pytest.approx((0.2 + 0.4) / (0.1 + 0.1))
    # In logarithms: the prompts weigh in with -1/3 and 1/3, which is a standard error of 1/3; t is 12.706 there.
    assert np.log(interval.ci95) == pytest.approx(np.log(3.0) + np.array([-1.0, 1.0]) * 12.7062 / 3, rel=1e-4)
    assert ratio_interval(slow, fast).value == pytest.approx(1 / 3)


def test_ratio_to_itself_is_one() -> None:
    measured = measurement([1.1, 1.3, 0.9])
    assert ratio_interval(measured, measured).ci95 == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize("others", [[1], [0], [1, 0], [0, 2], [0, 1, 2]])
def test_ratio_needs_the_same_prompts_in_the_same_order(others: list[int]) -> None:
    both = [Measurement(samples=tuple(sample(1.0, prompt) for prompt in prompts)) for prompts in ([0, 1], others)]
    with pytest.raises(ValueError, match="the same 2 or more prompts in the same order"):
        ratio_interval(*both)
    with pytest.raises(ValueError, match="the same 2 or more prompts in the same order"):
        ratio_interval(both[1], both[0])


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
