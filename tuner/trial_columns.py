"""The columns of a trial, the same in MLflow's table and in trials.csv."""

from __future__ import annotations

from typing import Any

from studies.contract import TrialRecord
from studies.measurement import Measurement


def trial_params(record: TrialRecord) -> dict[str, Any]:
    """Return the candidate of a trial and its notes, as flat columns."""
    draft, rule = record.candidate.draft, record.candidate.draft_length
    params: dict[str, Any] = {"study": record.study, "trial": record.number, "kind": draft.kind, "rule": rule.rule}
    params |= draft.columns()
    params |= {f"rule.{key}": value for key, value in rule.model_dump(exclude={"rule"}).items()}
    # Costs and priors of an adaptive rule are in the artefact `candidate.yaml`.
    params = {key: value for key, value in params.items() if isinstance(value, str | int | float | bool)}
    scalars = {key: value for key, value in record.notes.items() if isinstance(value, str | int | float | bool)}
    return {**params, **{f"note.{key}": value for key, value in scalars.items()}}


def trial_metrics(record: TrialRecord) -> dict[str, float]:
    """Return the measured figures of a trial; only its seconds if nothing was measured.

    Its speed-ups are named for the tuning prompts: a ranking of runs by `speedup` has each search once, by its held-out prompts.
    """
    measured = {} if record.measurement is None else measured_metrics(record.measurement)
    named = {f"tuning_{name}" if "speedup" in name else name: value for name, value in measured.items()}
    return {"seconds": record.seconds, **named}


def measured_metrics(measured: Measurement) -> dict[str, float]:
    """Return the figures of a measurement: of a trial, or of the winner on held-out prompts."""
    metrics = {
        "speedup": measured.speedup,
        "tokens_per_second": measured.draft_tokens_per_second,
        "plain_tokens_per_second": measured.plain_tokens_per_second,
        "draft_acceptance_rate": measured.draft_acceptance_rate,
        "mean_acceptance_length": measured.mean_acceptance_length,
        "tokens_per_round": measured.tokens_per_round,
        "drafted_per_round": measured.drafted_per_round,
        "prompts": measured.num_prompts,
        "identical_prompts": measured.num_identical,
        "ties": measured.num_ties,
        "exact": float(measured.is_lossless),
    }
    if len(measured.samples) > 1:
        metrics["speedup_low"], metrics["speedup_high"] = measured.speedup_interval().ci95
    if (whole := measured.end_to_end) is not None:
        interval = whole.speedup_interval()
        metrics |= {
            "end_to_end_speedup": interval.value,
            "end_to_end_speedup_low": interval.ci95[0],
            "end_to_end_speedup_high": interval.ci95[1],
            "end_to_end_tokens_per_second": whole.draft.tokens_per_second,
            "plain_end_to_end_tokens_per_second": whole.plain.tokens_per_second,
            "time_to_first_token_seconds": whole.time_to_first_token_seconds,
            "plain_time_to_first_token_seconds": whole.plain_time_to_first_token_seconds,
        }
    return metrics
