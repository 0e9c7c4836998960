"""Figures of comparisons: speed-ups and the metrics of requests."""

from __future__ import annotations

import pytest

from tests.support.suites import bench_found, measured, text_sample
from tuner.bench.contenders import PLAIN
from tuner.evaluation.suite.figures import request_metrics, speed_ratio
from tuner.evaluation.suite.result import MeasuredContender
from tuner.measuring.comparison import Phase


def test_end_to_end_counts_the_prefill_and_its_token() -> None:
    found = bench_found({PLAIN: [2.0, 4.0], "joint": [1.0, 2.0]})
    decode, whole = speed_ratio(found, "joint", Phase.DECODE), speed_ratio(found, "joint", Phase.END_TO_END)
    assert decode is not None
    assert whole is not None
    assert decode.value == pytest.approx(2.0)
    assert whole.value == pytest.approx((2.5 + 4.5) / (1.5 + 2.5))


def test_prompts_that_do_not_count_are_in_no_figure() -> None:
    found = bench_found({PLAIN: [2.0, 4.0, 100.0], "joint": [1.0, 2.0, 1.0]}, counted=(0, 1))
    speedup = speed_ratio(found, "joint", Phase.DECODE)
    assert speedup is not None
    assert speedup.value == pytest.approx(2.0)


def test_a_contender_without_figures_has_none() -> None:
    found = bench_found({PLAIN: [2.0, 4.0]})
    assert speed_ratio(found, "joint", Phase.DECODE) is None
    assert request_metrics(found, "joint") is None


def test_equal_drafts_share_their_figures() -> None:
    found = bench_found({PLAIN: [2.0, 4.0], "joint": [1.0, 2.0]}, same={"joint@qa": "joint"})
    assert request_metrics(found, "joint@qa") == request_metrics(found, "joint")


def test_metrics_of_requests_are_defined_as_in_aiperf() -> None:
    """Averages over requests, in milliseconds; the acceptance length is over all steps and counts the target's own token."""
    samples = (text_sample(0, 2.0, tokens=20, passes=10), text_sample(1, 1.0, tokens=40, passes=20))
    found = bench_found({PLAIN: [2.0, 4.0]})
    found = found.model_copy(
        update={
            "measured": {
                "joint": MeasuredContender(description="", settings={}, samples=samples),
                PLAIN: measured([2.0, 4.0]),
            }
        }
    )
    metrics = request_metrics(found, "joint")
    assert metrics is not None
    assert metrics.time_to_first_token == pytest.approx(500.0)
    assert metrics.inter_token_latency == pytest.approx((100.0 + 25.0) / 2)
    assert metrics.request_latency == pytest.approx((2500.0 + 1500.0) / 2)
    assert metrics.output_token_throughput_per_user == pytest.approx((10.0 + 40.0) / 2)
    assert (metrics.input_sequence_length, metrics.output_sequence_length) == (10.0, 31.0)
    assert (metrics.num_spec_steps, metrics.mean_acceptance_length) == (30, pytest.approx(2.0))
