"""What a search goes on with if time ends before any trial has: a lookup measured before the surveys, else plain decoding.

Surveys and costs take as long as the machine lets them, and a search that was admitted ends with a profile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decoding.draft_length import Fixed
from decoding.drafts import PlainDecoding, PromptLookup
from studies.contract import Candidate, TrialRecord, TrialState, best_trials
from studies.measurement import Measurement
from tuner.measuring.paired import Bench, FarTooSlowError
from tuner.progress import Progress
from tuner.search.race import Finalist
from tuner.search.task import Task
from tuner.search.time_plan import TimePlan

FEW_TRIALS = 8
"""Planned trials up to which surveys that take twice as long as planned could leave time for none."""
LOOKUP = Candidate(draft=PromptLookup(), draft_length=Fixed(max_tokens=4))


def measure_lookup(
    task: Task, plan: TimePlan, records: Sequence[TrialRecord], bench: Bench, progress: Progress
) -> TrialRecord | None:
    """Return a lookup measured as in a trial, or None if the search does not need it or does not ask for lookups."""
    config = task.config
    has_time = task.budget.timeout is None or plan.num_trials > FEW_TRIALS
    settings = [config.study_settings(name) for name in config.study]
    is_wanted = any("lookup" in getattr(each, "kinds", ()) for each in settings)
    if has_time or not is_wanted or task.deployment is not None or best_trials(records, 1):
        return None
    try:
        measured = bench.measure(LOOKUP, bench.indices[: config.samples_per_trial])
    except (FarTooSlowError, torch.OutOfMemoryError) as failure:
        progress.say(f"prompt lookup is not measured before the surveys: {failure}")
        return None
    if not measured.is_lossless:
        return None
    progress.say(f"prompt lookup before the surveys: {measured.speedup:.2f}x on {measured.num_prompts} tuning prompts")
    return _record("lookup", LOOKUP, measured)


def plain_winner(task: Task, records: Sequence[TrialRecord]) -> Finalist | None:
    """Return plain decoding as the winner of a search whose time ended before any trial; None if there was another reason."""
    failed = any(record.state is TrialState.FAIL for record in records)
    if task.budget.timeout is None or task.deployment is not None or failed or best_trials(records, 1):
        return None
    plain = Candidate(draft=PlainDecoding(), draft_length=Fixed())
    return Finalist(_record("plain", plain, None), Measurement(samples=()))


def _record(study: str, candidate: Candidate, measured: Measurement | None) -> TrialRecord:
    return TrialRecord(study=study, number=0, state=TrialState.COMPLETE, candidate=candidate, measurement=measured)
