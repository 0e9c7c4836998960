"""Measures one trial on a device: warms up the candidate's rule, measures the candidate, and ends early where that is enough.

Returns what measuring decides of a record. A disturbed trial is measured again, and so is one whose device is lost, on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import optuna
import torch

from decoding.errors import first_line
from studies.contract import Candidate, TrialState
from studies.measurement import Measurement, PromptSample
from tuner.executors.contract import DeviceLostError, RemoteTrialError, TrialDevice
from tuner.search.budget import Budget
from tuner.search.storage import StoredStudy

NUM_WARM_UP = 3
"""Prompts (or batches) that an adaptive rule is warmed up on before its trial, as it would be warm in production.

They are the first ones that the trial measures, so the trial's speed-up is slightly optimistic. Trials only choose finalists: race
and confirmation measure on prompts that no rule was warmed up on."""

FLOAT32_TIE = "at two tokens whose logits are equal within the rounding of float32: --exact bitwise removes such ties"

DEVICE, DISTURBED, ATTEMPTS = "device", "disturbed", "attempts"
"""Notes of a trial that an executor with named devices ran: the device, what disturbed its last measurement, and, if there were
several, the number of measurements that were begun."""


@dataclass(frozen=True)
class Outcome:
    """The fields of a record that measuring decides."""

    state: TrialState
    measurement: Measurement | None
    reason: str | None = None
    repeat_of: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    """Added to the study's own notes."""


class _NotLosslessError(Exception):
    """The candidate's output differs from plain decoding."""


class _Watch:
    """Collects the samples of a trial, and ends it early if the output is wrong, the candidate too slow or the time spent."""

    def __init__(self, reports: _Reports, num_wanted: int, budget: Budget) -> None:
        self._reports = reports
        self._num_wanted = num_wanted
        self._budget = budget
        self._samples: list[PromptSample] = []

    def __call__(self, sample: PromptSample) -> None:
        self._samples.append(sample)
        if not (sample.identical or sample.tie):
            raise _NotLosslessError(_wrong_output(sample))
        if self._reports.is_hopeless(sample):
            raise optuna.TrialPruned(f"slower than the best trial after {self._measured(sample)}")
        if len(self._samples) < self._num_wanted and (reason := self._budget.overdue()) is not None:
            raise optuna.TrialPruned(f"{reason}, after {self._measured(sample)}")

    def _measured(self, sample: PromptSample) -> str:
        return f"{len(self._samples)} {'prompts' if sample.batch is None else 'batches'}"

    def outcome(self, state: TrialState, reason: str | None = None) -> Outcome:
        """Return the outcome with the samples so far."""
        return Outcome(state, Measurement(samples=tuple(self._samples)) if self._samples else None, reason)


class _Reports:
    """What Optuna is told of a trial, prompt by prompt; a later measurement replaces what an earlier one has reported."""

    def __init__(self, trial: optuna.Trial, stored: StoredStudy) -> None:
        self._trial, self._stored = trial, stored
        self._reported: set[int] = set()
        self._is_again = False

    def begin(self, *, again: bool) -> None:
        """Begin a measurement, the first or a further one."""
        self._is_again = again

    def is_hopeless(self, sample: PromptSample) -> bool:
        """Report a sample and return True if the trial should be pruned.

        A further measurement is not pruned: the pruner would see what the first one has reported of prompts that are still to come.
        """
        if sample.prompt in self._reported:
            self._stored.correct_report(self._trial, step=sample.prompt, value=sample.ratio)
        else:
            self._reported.add(sample.prompt)
            self._trial.report(sample.ratio, step=sample.prompt)
        return not self._is_again and self._trial.should_prune()


class TrialWork:
    """The work of one trial, which an executor runs on a device; see `Work`."""

    MOST_LOST = 3
    """Lost devices after which a trial fails: its candidate may be the cause."""

    def __init__(
        self,
        trial: optuna.Trial,
        stored: StoredStudy,
        candidate: Candidate,
        indices: Sequence[int],
        budget: Budget,
        *,
        most_repeats: int = 0,
    ) -> None:
        """`most_repeats` is the number of times that a disturbed measurement is repeated."""
        self._candidate, self._indices, self._budget = candidate, indices, budget
        self._most_repeats = most_repeats
        self._reports = _Reports(trial, stored)
        self._num_begun = self._num_lost = 0

    def __call__(self, device: TrialDevice) -> Outcome:
        """Return the outcome on this device. Raises `DeviceLostError` if it is lost, for the first devices that are."""
        try:
            return self._repeated(device)
        except DeviceLostError as lost:
            self._num_lost += 1
            if self._num_lost < self.MOST_LOST:
                raise
            reason = f"{self._num_lost} devices were lost during this trial, the last one: {lost}"
            return Outcome(TrialState.FAIL, None, reason, notes=self._notes(device, None))

    def _repeated(self, device: TrialDevice) -> Outcome:
        """Measure until a measurement was not disturbed, or was the last one allowed."""
        for repeat in range(self._most_repeats + 1):
            device.watch.begin()
            outcome = self._measured(device)
            disturbed = device.watch.found()
            is_last = repeat == self._most_repeats or self._budget.overdue() is not None
            if disturbed is None or outcome.state is TrialState.FAIL or is_last:
                return replace(outcome, notes=self._notes(device, disturbed))
        raise AssertionError("the last repeat returns")

    def _measured(self, device: TrialDevice) -> Outcome:
        """Warm up the candidate's rule, measure the candidate and return the outcome."""
        self._reports.begin(again=self._num_begun > 0)
        self._num_begun += 1
        watch = _Watch(self._reports, len(self._indices), self._budget)
        try:
            # In production an adaptive rule starts warmed up, so it is warmed up before it is measured.
            warmed_up = device.bench.warm_up_rule(self._candidate, self._indices[:NUM_WARM_UP])
            device.bench.measure(warmed_up, self._indices, on_sample=watch)
        except optuna.TrialPruned as pruned:
            return watch.outcome(TrialState.PRUNED, str(pruned))
        except DeviceLostError:
            raise
        except (Exception, SystemExit) as failure:  # recorded and shown, and the search goes on
            _free_memory(failure)
            return watch.outcome(TrialState.FAIL, describe_failure(failure))
        return watch.outcome(TrialState.COMPLETE)

    def _notes(self, device: TrialDevice, disturbed: str | None) -> dict[str, Any]:
        if device.name is None:
            return {}
        notes: dict[str, Any] = {DEVICE: device.name}
        if disturbed is not None:
            notes[DISTURBED] = disturbed
        if self._num_begun > 1:
            notes[ATTEMPTS] = self._num_begun
        return notes


def _wrong_output(sample: PromptSample) -> str:
    tie = f" {FLOAT32_TIE}" if sample.float32_tie else ""
    if (batch := sample.batch) is None:
        return f"the output for tuning prompt {sample.prompt} differs from plain decoding{tie}"
    wrong = batch.count - batch.identical - batch.ties
    return f"{wrong} of {batch.count} outputs for tuning batch {sample.prompt} differ from plain decoding{tie}"


def describe_failure(failure: BaseException) -> str:
    """Return the first line of the failure's message, for a table; what is no text in it becomes a question mark."""
    name = "" if isinstance(failure, _NotLosslessError | RemoteTrialError) else f"{type(failure).__name__}: "
    message = name + first_line(failure, default="no message")
    return message.encode("utf-8", errors="replace").decode("utf-8")


def _free_memory(failure: BaseException) -> None:
    if isinstance(failure, torch.OutOfMemoryError) and torch.cuda.is_available():
        torch.cuda.empty_cache()
