"""The trials of a study under `study.optimize`: suggest, measure by real decoding, store the record, tell Optuna.

Only what the candidate does wrong is caught, as a failed trial: its output differs from plain decoding, decoding it raises, memory
does not suffice. Any other error ends the search. A trial that looks worse than the best, prompt by prompt, is pruned. A repeated
candidate takes over the earlier measurement. Other processes may run trials of the same study.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import optuna
import torch

from decoding.errors import first_line
from studies.contract import Candidate, TrialRecord, TrialState
from studies.measurement import Measurement, PromptSample
from studies.samplers.contract import BEGUN, StudySampler, measured_now
from tuner.measuring.turns import Measuring
from tuner.search.budget import TrialTime
from tuner.search.storage import FAILURES, StoredStudy

NUM_WARM_UP = 3
"""Prompts (or batches) that an adaptive rule is warmed up on before its trial, as it would be warm in production.

They are the first ones that the trial measures, so the trial's speed-up is slightly optimistic. Trials only choose finalists: race
and confirmation measure on prompts that no rule was warmed up on."""
FLOAT32_TIE = "at two tokens whose logits are equal within the rounding of float32: --exact bitwise removes such ties"
_Outcome = tuple[TrialState, Measurement | None, str | None, int | None]
"""State, measurement, reason and number of the repeated trial, as a record has them."""


class CandidateError(Exception):
    """A candidate failed: its trial has failed, and the search goes on."""


class NotLosslessError(Exception):
    """The candidate's output differs from plain decoding."""


class Trials:
    """The trials of one study in this process, on the prompts (or batches) at `indices` of `bench`."""

    def __init__(
        self,
        sampler: StudySampler,
        stored: StoredStudy,
        bench: Measuring,
        indices: Sequence[int],
        *,
        most: int | None = None,
        patience: int | None = None,
        limit: TrialTime | None = None,
        on_record: Callable[[TrialRecord], None] = lambda record: None,
        measuring: Callable[[], AbstractContextManager[Any]] = nullcontext,
        check: Callable[[Candidate], None] = lambda candidate: None,
    ) -> None:
        """`most` counts the trials of all processes, `patience` those without a better speed-up; both count stored ones.

        `on_record` gets the records made here. `measuring` makes the context that a measurement runs in. `check` raises for a
        candidate that is not to be measured.
        """
        self._sampler, self._stored, self._bench, self._indices = sampler, stored, bench, indices
        self._most, self._patience, self._limit = most, patience, limit
        self._on_record, self._measuring, self._check = on_record, measuring, check
        self._since = time.perf_counter()
        """When this process began to learn from the last trial, and to choose the next candidate."""
        with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
            stored.study.pruner = optuna.pruners.WilcoxonPruner(p_threshold=0.1, n_startup_steps=3)

    def run(self) -> tuple[list[TrialRecord], str]:
        """Run trials until the study has ended; return the records of all processes by number, and the reason for the end."""
        self._end = self._why_none_begins()
        while self._end is None:
            try:
                self._stored.study.optimize(self._objective, catch=(CandidateError,), callbacks=[self._stop_at_end])
            except (optuna.exceptions.UpdateFinishedTrialError, ValueError) as closed:
                # Another process took this one for dead, as it was silent for long: its trial is lost, no more.
                if isinstance(closed, ValueError) and not str(closed).startswith("Cannot tell a "):
                    raise
                self._end = self._why_none_begins()
        self._stored.wait_for_others()
        self._sampler.learn(self._stored.study)
        return self._stored.records(), self._end

    def _stop_at_end(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        self._end = self._why_none_begins()
        if self._end is not None:
            study.stop()

    def _why_none_begins(self, before: int | None = None) -> str | None:
        """Return the reason that the study has ended, or None.

        Wait while trials of other processes (those with a number below `before`) may be the last ones, or decide what is next.
        """
        while True:
            # Before the records: a trial that ends between the two looks counts twice for a moment, rather than not at all.
            running = measured_now(self._stored.study, before)
            ended = self._ended()
            if ended is not None or not running or self._goes_beside(len(running)):
                return ended
            self._stored.wait()

    def _ended(self) -> str | None:
        # The limits first: a study may compute for long before it answers.
        records = self._stored.records()
        if self._most is not None and len(records) >= self._most:
            return f"{len(records)} trials done"
        if self._limit is not None and (spent := self._limit.spent()) is not None:
            return spent
        if (ended := self._sampler.finished(self._stored.study)) is not None:
            return ended
        if self._patience is not None and (idle := _num_idle(records)) >= self._patience:
            return f"no better candidate in {idle} trials"
        return None

    def _goes_beside(self, num_running: int) -> bool:
        """Return True if a trial may begin while these run."""
        room = self._most is None or len(self._stored.records()) + num_running < self._most
        return room and not self._sampler.follows

    def _objective(self, trial: optuna.Trial) -> float:
        """Run one trial; see `optuna.Study.optimize`."""
        candidate, notes = self._suggested(trial)
        state, measurement, reason, repeat_of = self._repeated(trial, candidate) or self._measured(trial, candidate)
        now = time.perf_counter()
        record = TrialRecord(
            study=self._sampler.name,
            number=trial.number,
            candidate=candidate,
            state=state,
            measurement=measurement,
            reason=reason,
            repeat_of=repeat_of,
            notes=notes,
            seconds=now - self._since,
        )
        self._since = now
        # On disk before Optuna or the study learns of it: a kill from here on loses nothing.
        self._stored.keep(trial, record)
        if self._limit is not None:
            self._limit.took(record)
        shown = time.perf_counter()
        self._on_record(record)
        self._since += time.perf_counter() - shown  # showing a record counts with none
        if state is TrialState.COMPLETE:
            assert record.speedup is not None, "a complete trial is measured"
            return record.speedup
        raise optuna.TrialPruned(reason) if state is TrialState.PRUNED else CandidateError(reason)

    def _suggested(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """Return the suggested candidate and the study's notes, and tell other processes what is measured here.

        Of processes that begin trials at once, those with a higher number wait where a candidate follows from the trial before.
        """
        study = self._stored.study
        if (ended := self._why_none_begins(before=trial.number)) is not None:
            raise CandidateError(f"not needed: {ended}")
        candidate = self._sampler.space.suggest(trial)
        notes = self._sampler.notes(candidate)
        trial.set_user_attr(BEGUN, candidate.key)
        while any(each is not None and each.key == candidate.key for each in measured_now(study, trial.number)):
            self._stored.wait()
        return candidate, notes

    def _repeated(self, trial: optuna.Trial, candidate: Candidate) -> _Outcome | None:
        """Return the outcome of an earlier trial of the same candidate, or None. A failed trial is not taken over."""
        same = (
            each for each in self._stored.records() if each.candidate.key == candidate.key and each.repeat_of is None
        )
        known = next((each for each in same if each.state is not TrialState.FAIL), None)
        if known is None:
            return None
        for sample in known.measurement.samples if known.measurement else ():
            trial.report(sample.ratio, step=sample.prompt)
        return known.state, known.measurement, None, known.number

    def _measured(self, trial: optuna.Trial, candidate: Candidate) -> _Outcome:
        """Warm up the candidate's rule, measure the candidate and return the outcome."""
        samples: list[PromptSample] = []

        def on_sample(sample: PromptSample) -> None:
            samples.append(sample)
            if not (sample.identical or sample.tie):
                raise NotLosslessError(_wrong_output(sample))
            trial.report(sample.ratio, step=sample.prompt)
            measured = f"{len(samples)} {'prompts' if sample.batch is None else 'batches'}"
            if trial.should_prune():
                raise optuna.TrialPruned(f"slower than the best trial after {measured}")
            is_last = len(samples) == len(self._indices)
            if not is_last and self._limit is not None and (reason := self._limit.overdue()) is not None:
                raise optuna.TrialPruned(f"{reason}, after {measured}")

        state, reason = TrialState.COMPLETE, None
        try:
            self._check(candidate)
            with self._measuring():
                # In production an adaptive rule starts warmed up, so it is warmed up before it is measured.
                warmed_up = self._bench.warm_up_rule(candidate, self._indices[:NUM_WARM_UP])
                self._bench.measure(warmed_up, self._indices, on_sample=on_sample)
        except optuna.TrialPruned as pruned:
            state, reason = TrialState.PRUNED, str(pruned)
        except (*FAILURES, optuna.exceptions.UpdateFinishedTrialError):
            raise  # of the storage, not of the candidate
        except (Exception, SystemExit) as failure:  # whatever decoding the candidate raises
            _free_memory(failure)
            state, reason = TrialState.FAIL, describe_failure(failure)
        return state, Measurement(samples=tuple(samples)) if samples else None, reason, None


def _num_idle(records: Sequence[TrialRecord]) -> int:
    """Return the number of trials since the best speed-up. A repeat shows no new one."""
    best, last = 0.0, 0
    for count, record in enumerate(records, start=1):
        if record.speedup is not None and record.repeat_of is None and record.speedup > best:
            best, last = record.speedup, count
    return len(records) - last


def _wrong_output(sample: PromptSample) -> str:
    tie = f" {FLOAT32_TIE}" if sample.float32_tie else ""
    if (batch := sample.batch) is None:
        return f"the output for tuning prompt {sample.prompt} differs from plain decoding{tie}"
    wrong = batch.count - batch.identical - batch.ties
    return f"{wrong} of {batch.count} outputs for tuning batch {sample.prompt} differ from plain decoding{tie}"


def describe_failure(failure: BaseException) -> str:
    """Return the first line of the failure's message, for a table; what is no text in it becomes a question mark."""
    name = "" if isinstance(failure, NotLosslessError) else f"{type(failure).__name__}: "
    message = name + first_line(failure, default="no message")
    return message.encode("utf-8", errors="replace").decode("utf-8")


def _free_memory(failure: BaseException) -> None:
    if isinstance(failure, torch.OutOfMemoryError) and torch.cuda.is_available():
        torch.cuda.empty_cache()
