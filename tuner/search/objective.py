"""The trials of a study under `study.optimize`: learn, propose, measure by real decoding, store the record, tell Optuna.

Only what the candidate does wrong is caught, as a failed trial: its output differs from plain decoding, decoding it raises, memory
does not suffice. Any other error ends the search. A trial that looks worse than the best, prompt by prompt, is pruned. A repeated
candidate takes over the earlier measurement. Other processes may run trials of the same study.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import optuna
import torch

from decoding.errors import first_line
from studies.contract import Candidate, Study, TrialRecord, TrialState
from studies.measurement import Measurement, PromptSample
from tuner.freed_memory import large_blocks_given_back
from tuner.measuring.turns import Measuring
from tuner.search.budget import Limit
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
        study: Study,
        stored: StoredStudy,
        bench: Measuring,
        indices: Sequence[int],
        *,
        most: int | None = None,
        limit: Limit | None = None,
        on_record: Callable[[TrialRecord], None] = lambda record: None,
        measuring: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`most` counts the trials of all processes, stored ones included. `on_record` gets the records made here.

        `measuring` makes the context that a measurement runs in.
        """
        self._study, self._stored, self._bench, self._indices = study, stored, bench, indices
        self._most, self._limit, self._on_record, self._measuring = most, limit, on_record, measuring
        self._known: set[int] = set()
        self._since = time.perf_counter()
        """When this process began to learn from the last trial, and to choose the next candidate."""

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
        self._learn()
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
            running = self._stored.running(before)
            self._learn()  # after the look: a trial that ends between the two counts twice for a moment, rather than not at all
            ended = self._ended()
            if ended is not None or not running or self._goes_beside(running):
                return ended
            self._stored.wait()

    def _ended(self) -> str | None:
        # The limits first: a study may compute for long before it answers.
        if self._most is not None and len(self._known) >= self._most:
            return f"{len(self._known)} trials done"
        if self._limit is not None and (spent := self._limit.spent()) is not None:
            return spent
        return self._study.finished()

    def _goes_beside(self, running: Sequence[Candidate | None]) -> bool:
        """Return True if the study proposes something while these are measured; of one that is being chosen nothing is known."""
        if self._most is not None and len(self._known) + len(running) >= self._most:
            return False
        return self._study.proposes_beside([each for each in running if each is not None])

    def _learn(self) -> None:
        """Let the study observe the records of all processes that it does not know, by number."""
        for record in self._stored.records():
            if record.number not in self._known:
                self._known.add(record.number)
                with large_blocks_given_back():
                    self._study.observe(record)

    def _objective(self, trial: optuna.Trial) -> float:
        """Run one trial; see `optuna.Study.optimize`."""
        candidate, notes = self._proposal(trial)
        state, measurement, reason, repeat_of = self._repeated(trial, candidate) or self._measured(trial, candidate)
        now = time.perf_counter()
        record = TrialRecord(
            study=self._study.name,
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
        self._learn()
        shown = time.perf_counter()
        self._on_record(record)
        self._since += time.perf_counter() - shown  # showing a record counts with none
        if state is TrialState.COMPLETE:
            assert record.speedup is not None, "a complete trial is measured"
            return record.speedup
        raise optuna.TrialPruned(reason) if state is TrialState.PRUNED else CandidateError(reason)

    def _proposal(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """Return the study's next candidate and its notes, and tell other processes what is measured here.

        Of processes that begin trials at once, those with a higher number wait where a candidate follows from the trial before.
        """
        num_known = len(self._known)
        running = self._stored.running(before=trial.number)
        self._learn()
        if (running or len(self._known) > num_known) and (
            ended := self._why_none_begins(before=trial.number)
        ) is not None:
            raise CandidateError(f"not needed: {ended}")
        with large_blocks_given_back():
            candidate, notes = self._study.propose(trial)
        self._stored.begin(trial, candidate)
        while any(each is not None and each.key == candidate.key for each in self._stored.running(before=trial.number)):
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
