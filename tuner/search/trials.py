"""Runs one study: asks it for a candidate, measures that by real decoding, puts the record on disk, tells the study.

A candidate whose text is not plain decoding's is a failed trial, whatever its speed; so is one that raises. A trial that
looks worse than the best prompt by prompt is pruned. A candidate met before takes over the earlier measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
import torch

from studies.contract import Candidate, Study, TrialRecord, TrialState
from studies.measurement import Measurement, PromptSample
from tuner.measuring.paired import Bench
from tuner.search.storage import StoredStudy

NUM_WARM_UP = 3
"""Prompts (or batches) that an adaptive rule is warmed up on before its trial, as it would be warm in production.

They are the first ones that the trial measures, so the trial's speed-up is slightly optimistic. Trials only choose finalists: race
and confirmation measure on prompts that no rule was warmed up on."""

OnRecord = Callable[[TrialRecord], None]


@dataclass
class Budget:
    """What a study may spend: trials, its stored ones included, and seconds of trials from now on."""

    trials: int | None
    seconds: float | None
    spent_seconds: float = 0.0

    def exhausted(self, num_trials: int) -> str | None:
        """Why no further trial of a study with `num_trials` may begin, or None."""
        if self.trials is not None and num_trials >= self.trials:
            return f"all {num_trials} trials are spent"
        if self.seconds is not None and self.spent_seconds >= self.seconds:
            return "its share of the search time is spent"
        return None


class _NotLosslessError(Exception):
    """The candidate wrote another text than plain decoding."""


def run_study(
    study: Study, stored: StoredStudy, bench: Bench, indices: Sequence[int], budget: Budget, on_record: OnRecord
) -> tuple[list[TrialRecord], str]:
    """Run `study` until it is finished or the budget is; `indices` are the tuning prompts a trial decodes.

    Returns all its records, those of earlier runs first, and why it ended.
    """
    records = stored.records()
    for record in records:
        study.observe(record)
    start = time.perf_counter()
    # The budget first: a study may think long before it says whether it goes on.
    while (ended := budget.exhausted(len(records)) or study.finished()) is None:
        trial = stored.ask()
        candidate, notes = study.propose(trial)
        record = _run_trial(study.name, trial, candidate, notes, records, bench, indices, start)
        stored.finish(trial, record)
        records.append(record)
        budget.spent_seconds += record.seconds
        told = time.perf_counter()
        study.observe(record)
        learning = time.perf_counter() - told
        on_record(record)
        # A trial is on disk before the study learns of it: what that takes, and what it takes to see whether to go on (a study
        # may choose what comes next to tell), counts with the trial it leads to.
        start = time.perf_counter() - learning
    return records, ended


def _run_trial(
    study: str,
    trial: optuna.Trial,
    candidate: Candidate,
    notes: dict[str, Any],
    earlier: Sequence[TrialRecord],
    bench: Bench,
    indices: Sequence[int],
    start: float,
) -> TrialRecord:
    """Measure a candidate; its seconds run from `start`, where the study began to think of it."""
    facts: dict[str, Any] = {"study": study, "number": trial.number, "candidate": candidate, "notes": notes}
    if known := _measured_before(candidate, earlier):
        for sample in known.measurement.samples if known.measurement else ():
            trial.report(sample.ratio, step=sample.prompt)
        return TrialRecord(
            **facts,
            state=known.state,
            measurement=known.measurement,
            repeat_of=known.number,
            seconds=time.perf_counter() - start,
        )
    samples: list[PromptSample] = []

    def watch(sample: PromptSample) -> None:
        samples.append(sample)
        if not (sample.identical or sample.tie):
            raise _NotLosslessError(_wrong_text(sample))
        trial.report(sample.ratio, step=sample.prompt)
        if trial.should_prune():
            measured = f"{len(samples)} {'prompts' if sample.batch is None else 'batches'}"
            raise optuna.TrialPruned(f"slower than the best trial after {measured}")

    state, reason = TrialState.COMPLETE, None
    try:
        # In production an adaptive rule starts warmed up, so it is warmed up before it is measured.
        warm = bench.warm_up_rule(candidate, indices[:NUM_WARM_UP])
        bench.measure(warm, indices, on_sample=watch)
    except optuna.TrialPruned as pruned:
        state, reason = TrialState.PRUNED, str(pruned)
    except (
        Exception
    ) as failure:  # a failed trial, whatever failed in it: recorded with its reason, shown, and the search goes on
        state, reason = TrialState.FAIL, describe_failure(failure)
        _free_memory(failure)
    return TrialRecord(
        **facts,
        state=state,
        measurement=Measurement(samples=tuple(samples)) if samples else None,
        reason=reason,
        seconds=time.perf_counter() - start,
    )


def _wrong_text(sample: PromptSample) -> str:
    if (batch := sample.batch) is None:
        return f"the text of tuning prompt {sample.prompt} is not that of plain decoding"
    wrong = batch.count - batch.identical - batch.ties
    return f"{wrong} of {batch.count} texts of tuning batch {sample.prompt} are not those of plain decoding"


def _measured_before(candidate: Candidate, earlier: Sequence[TrialRecord]) -> TrialRecord | None:
    same = (r for r in earlier if r.candidate.key == candidate.key and r.repeat_of is None)
    return next((r for r in same if r.state is not TrialState.FAIL), None)


def describe_failure(failure: Exception) -> str:
    """The first line of what went wrong, for a table."""
    name = "" if isinstance(failure, _NotLosslessError) else f"{type(failure).__name__}: "
    return name + (str(failure).strip().splitlines() or ["no message"])[0]


def _free_memory(failure: Exception) -> None:
    if isinstance(failure, torch.OutOfMemoryError) and torch.cuda.is_available():
        torch.cuda.empty_cache()
