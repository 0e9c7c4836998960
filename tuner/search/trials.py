"""Runs one study: asks for a candidate, measures it by real decoding, stores the record, tells the study.

A candidate whose output differs from plain decoding is a failed trial, whatever its speed; so is one that raises. A trial that
looks worse than the best, prompt by prompt, is pruned. A repeated candidate takes over the earlier measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import optuna
import torch

from decoding.errors import first_line
from studies.contract import Candidate, Study, TrialRecord, TrialState
from studies.measurement import Measurement, PromptSample
from tuner.freed_memory import large_blocks_given_back
from tuner.measuring.contract import Measuring
from tuner.search.storage import StoredStudy

NUM_WARM_UP = 3
"""Prompts (or batches) that an adaptive rule is warmed up on before its trial, as it would be warm in production.

They are the first ones that the trial measures, so the trial's speed-up is slightly optimistic. Trials only choose finalists: race
and confirmation measure on prompts that no rule was warmed up on."""

FLOAT32_TIE = "at two tokens whose logits are equal within the rounding of float32: --exact bitwise removes such ties"

OnRecord = Callable[[TrialRecord], None]


@dataclass
class Budget:
    """Limits of a study: trials, stored ones included, and seconds of trials from now on. None is unlimited."""

    trials: int | None
    seconds: float | None
    spent_seconds: float = 0.0

    def exhausted(self, num_trials: int) -> str | None:
        """Return the reason that a study with `num_trials` may begin no further trial, or None."""
        if self.trials is not None and num_trials >= self.trials:
            return f"all {num_trials} trials are spent"
        if self.seconds is not None and self.spent_seconds >= self.seconds:
            return "its share of the search time is spent"
        return None

    def overdue(self) -> str | None:
        """Return the reason to cut the running trial between two prompts, or None."""
        return None

    def spend(self, record: TrialRecord) -> None:
        """Count the seconds of a finished trial."""
        self.spent_seconds += record.seconds


def run_study(
    study: Study, stored: StoredStudy, bench: Measuring, indices: Sequence[int], budget: Budget, on_record: OnRecord
) -> tuple[list[TrialRecord], str]:
    """Run `study` until it is finished or `budget` is spent, with trials on the prompts (or batches) at `indices`.

    Returns all records, by number, and the reason for the end. Other processes may run trials of the same study: it learns from
    their records too, before its next trial. `on_record` gets the records made here.
    """
    known: set[int] = set()
    _learn(study, stored, known)
    start = time.perf_counter()
    # The budget first: a study may compute for long before it answers.
    while (ended := budget.exhausted(len(known)) or study.finished()) is None:
        record = _run_trial(study, stored, bench, indices, budget, start)
        budget.spend(record)
        start = time.perf_counter()
        _learn(study, stored, known)
        learning = time.perf_counter() - start
        on_record(record)
        # Learning from this trial and choosing the next count with the next; showing the record counts with none.
        start = time.perf_counter() - learning
    return stored.records(), ended


def _learn(study: Study, stored: StoredStudy, known: set[int]) -> None:
    """Let the study observe the records that it does not know, by number, and close the trials of dead processes."""
    stored.sweep()
    for record in stored.records():
        if record.number not in known:
            known.add(record.number)
            with large_blocks_given_back():
                study.observe(record)


def _run_trial(
    study: Study,
    stored: StoredStudy,
    bench: Measuring,
    indices: Sequence[int],
    budget: Budget,
    start: float,
) -> TrialRecord:
    """Run one trial and write it to disk. Its seconds count from `start`, when the study began to choose it."""
    trial = stored.ask()
    try:
        with large_blocks_given_back():
            candidate, notes = study.propose(trial)
        outcome = _repeated(trial, candidate, stored.records()) or _measured(trial, candidate, bench, indices, budget)
    except BaseException:
        stored.abandon(trial)
        raise
    record = TrialRecord(
        study=study.name,
        number=trial.number,
        candidate=candidate,
        notes=notes,
        seconds=time.perf_counter() - start,
        **vars(outcome),
    )
    # On disk before the study learns of it: a kill from here on loses nothing.
    stored.finish(trial, record)
    return record


@dataclass(frozen=True)
class _Outcome:
    """The fields of a record that measuring decides."""

    state: TrialState
    measurement: Measurement | None
    reason: str | None = None
    repeat_of: int | None = None


class _NotLosslessError(Exception):
    """The candidate's output differs from plain decoding."""


class _Watch:
    """Collects the samples of a trial, and ends it early if the output is wrong, the candidate too slow or the time spent."""

    def __init__(self, trial: optuna.Trial, num_wanted: int, budget: Budget) -> None:
        self._trial = trial
        self._num_wanted = num_wanted
        self._budget = budget
        self._samples: list[PromptSample] = []

    def __call__(self, sample: PromptSample) -> None:
        self._samples.append(sample)
        if not (sample.identical or sample.tie):
            raise _NotLosslessError(_wrong_output(sample))
        self._trial.report(sample.ratio, step=sample.prompt)
        if self._trial.should_prune():
            raise optuna.TrialPruned(f"slower than the best trial after {self._measured(sample)}")
        if len(self._samples) < self._num_wanted and (reason := self._budget.overdue()) is not None:
            raise optuna.TrialPruned(f"{reason}, after {self._measured(sample)}")

    def _measured(self, sample: PromptSample) -> str:
        return f"{len(self._samples)} {'prompts' if sample.batch is None else 'batches'}"

    def outcome(self, state: TrialState, reason: str | None = None) -> _Outcome:
        """Return the outcome with the samples so far."""
        return _Outcome(state, Measurement(samples=tuple(self._samples)) if self._samples else None, reason)


def _measured(
    trial: optuna.Trial, candidate: Candidate, bench: Measuring, indices: Sequence[int], budget: Budget
) -> _Outcome:
    """Warm up the candidate's rule, measure the candidate and return the outcome."""
    watch = _Watch(trial, len(indices), budget)
    try:
        # In production an adaptive rule starts warmed up, so it is warmed up before it is measured.
        warmed_up = bench.warm_up_rule(candidate, indices[:NUM_WARM_UP])
        bench.measure(warmed_up, indices, on_sample=watch)
    except optuna.TrialPruned as pruned:
        return watch.outcome(TrialState.PRUNED, str(pruned))
    except (Exception, SystemExit) as failure:  # whatever a trial raises is recorded and shown, and the search goes on
        _free_memory(failure)
        return watch.outcome(TrialState.FAIL, describe_failure(failure))
    return watch.outcome(TrialState.COMPLETE)


def _repeated(trial: optuna.Trial, candidate: Candidate, earlier: Sequence[TrialRecord]) -> _Outcome | None:
    """Return the outcome of an earlier trial of the same candidate, or None. A failed trial is not taken over."""
    same = (record for record in earlier if record.candidate.key == candidate.key and record.repeat_of is None)
    known = next((record for record in same if record.state is not TrialState.FAIL), None)
    if known is None:
        return None
    for sample in known.measurement.samples if known.measurement else ():
        trial.report(sample.ratio, step=sample.prompt)
    return _Outcome(known.state, known.measurement, repeat_of=known.number)


def _wrong_output(sample: PromptSample) -> str:
    tie = f" {FLOAT32_TIE}" if sample.float32_tie else ""
    if (batch := sample.batch) is None:
        return f"the output for tuning prompt {sample.prompt} differs from plain decoding{tie}"
    wrong = batch.count - batch.identical - batch.ties
    return f"{wrong} of {batch.count} outputs for tuning batch {sample.prompt} differ from plain decoding{tie}"


def describe_failure(failure: BaseException) -> str:
    """Return the first line of the failure's message, for a table; what is no text in it becomes a question mark."""
    name = "" if isinstance(failure, _NotLosslessError) else f"{type(failure).__name__}: "
    message = name + first_line(failure, default="no message")
    return message.encode("utf-8", errors="replace").decode("utf-8")


def _free_memory(failure: BaseException) -> None:
    if isinstance(failure, torch.OutOfMemoryError) and torch.cuda.is_available():
        torch.cuda.empty_cache()
