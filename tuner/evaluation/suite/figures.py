"""Figures of one comparison. Pure functions of its samples.

Names and definitions of the request metrics are AIPerf's: averages over requests, and an acceptance length of 1 + accepted
drafts / steps, which includes the target's own token.
"""

from __future__ import annotations

from statistics import fmean

from decoding.documents.strict_yaml import Document
from studies.ratios import Ratio
from tuner.bench.contenders import PLAIN
from tuner.bench.result import Entry, Phase
from tuner.evaluation.suite.result import BenchFound

MILLISECONDS = 1000.0


class RequestMetrics(Document):
    """Metrics of requests, averaged over them. Times are in milliseconds."""

    time_to_first_token: float
    inter_token_latency: float
    request_latency: float
    output_token_throughput_per_user: float
    """Tokens per second after the first ones."""
    input_sequence_length: float
    output_sequence_length: float
    mean_acceptance_length: float
    """1 + accepted drafts / steps, over all steps of all requests."""
    draft_acceptance_rate: float | None
    num_spec_steps: int


def entry_of(found: BenchFound, name: str) -> Entry | None:
    """Return a contender with its samples, or None if it has no figures."""
    measured = found.of(name)
    return None if measured is None else Entry(name, measured.description, measured.settings, measured.samples)


def speed_ratio(found: BenchFound, name: str, phase: Phase, reference: str = PLAIN) -> Ratio | None:
    """Return the speed of `name` over that of `reference` on the counted prompts, or None if one has no figures."""
    faster, slower = entry_of(found, name), entry_of(found, reference)
    if faster is None or slower is None:
        return None
    return Ratio.of_speeds(slower.work(found.counted, phase), faster.work(found.counted, phase))


def request_metrics(found: BenchFound, name: str) -> RequestMetrics | None:
    """Return the metrics of a contender over the counted prompts, or None if it has no figures."""
    entry = entry_of(found, name)
    if entry is None:
        return None
    samples = [sample for sample in entry.samples if sample.prompt in found.counted]
    latencies = [sample.decode_seconds / sample.decode_tokens for sample in samples]
    acceptance = entry.acceptance(found.counted)
    return RequestMetrics(
        time_to_first_token=MILLISECONDS * fmean(sample.prefill_seconds for sample in samples),
        inter_token_latency=MILLISECONDS * fmean(latencies),
        request_latency=MILLISECONDS * fmean(sample.seconds for sample in samples),
        output_token_throughput_per_user=fmean(1.0 / latency for latency in latencies),
        input_sequence_length=fmean(sample.prompt_tokens for sample in samples),
        output_sequence_length=fmean(sample.tokens for sample in samples),
        mean_acceptance_length=acceptance.mean_acceptance_length,
        draft_acceptance_rate=acceptance.draft_acceptance_rate,
        num_spec_steps=acceptance.num_spec_steps,
    )
