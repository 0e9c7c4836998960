"""Figures of one comparison. Pure functions of its samples.

Names and definitions of the request metrics are AIPerf's: averages over requests, and an acceptance length of 1 + accepted
drafts / steps, which includes the target's own token.
"""

from __future__ import annotations

from statistics import fmean

from decoding.documents.strict_yaml import Document
from studies.measurement import Measurement
from studies.ratios import Ratio
from tuner.evaluation.suite.result import BenchFound
from tuner.measuring.comparison import Phase
from tuner.measuring.contender import PLAIN

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


def counted(found: BenchFound, name: str) -> Measurement | None:
    """Return a contender's samples of the counted prompts, or None if it has no figures."""
    measured = found.of(name)
    if measured is None:
        return None
    return Measurement(samples=tuple(each for each in measured.samples if each.prompt in found.counted))


def speed_ratio(found: BenchFound, name: str, phase: Phase, reference: str = PLAIN) -> Ratio | None:
    """Return the speed of `name` over that of `reference` on the counted prompts, or None if one has no figures."""
    faster, slower = counted(found, name), counted(found, reference)
    if faster is None or slower is None:
        return None
    return Ratio.of_speeds(phase.work(slower), phase.work(faster))


def request_metrics(found: BenchFound, name: str) -> RequestMetrics | None:
    """Return the metrics of a contender over the counted prompts, or None if it has no figures."""
    measured = counted(found, name)
    if measured is None:
        return None
    decode, whole = Phase.DECODE.work(measured), Phase.END_TO_END.work(measured)
    latencies = decode.seconds / decode.tokens
    return RequestMetrics(
        time_to_first_token=MILLISECONDS * float((whole.seconds - decode.seconds).mean()),
        inter_token_latency=MILLISECONDS * float(latencies.mean()),
        request_latency=MILLISECONDS * float(whole.seconds.mean()),
        output_token_throughput_per_user=float((1.0 / latencies).mean()),
        input_sequence_length=fmean(found.prompt_tokens[sample.prompt] for sample in measured.samples),
        output_sequence_length=float(whole.tokens.mean()),
        mean_acceptance_length=measured.mean_acceptance_length,
        draft_acceptance_rate=measured.draft_acceptance_rate if measured.num_draft_tokens else None,
        num_spec_steps=measured.num_spec_steps,
    )
