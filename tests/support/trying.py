"""Trials of a sampler with made-up measurements, run as a search runs them: suggested, recorded, told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import optuna

from studies.contract import Candidate, TrialRecord, TrialState
from studies.samplers.contract import BEGUN, RECORD, StudySampler
from tests.support.records import measurement

Speed = Callable[[Candidate, dict[str, Any]], float | None]
"""The speed-up of a candidate with its notes; None fails."""


class Trying:
    """A sampler in a study in memory, or in `stored`, which another one of the same search has begun."""

    def __init__(self, sampler: StudySampler, stored: optuna.Study | None = None) -> None:
        self.sampler = sampler
        self.study = stored or optuna.create_study(direction="maximize")
        self.study.sampler = sampler
        sampler.begin(self.study)
        self.running: dict[int, tuple[optuna.Trial, Candidate, dict[str, Any]]] = {}

    @property
    def ended(self) -> str | None:
        return self.sampler.finished(self.study)

    @property
    def records(self) -> list[TrialRecord]:
        stored = [trial.user_attrs.get(RECORD) for trial in self.study.trials]
        return [TrialRecord.model_validate_json(each) for each in stored if each is not None]

    def suggest(self) -> Candidate:
        """Begin a trial, which runs until `end`."""
        trial = self.study.ask()
        candidate = self.sampler.space.suggest(trial)
        self.running[trial.number] = trial, candidate, self.sampler.notes(candidate)
        trial.set_user_attr(BEGUN, candidate.key)
        return candidate

    def end(self, number: int, speedup: float | None, **facts: Any) -> TrialRecord:
        trial, candidate, notes = self.running.pop(number)
        record = TrialRecord(
            **{
                "study": self.sampler.name,
                "number": number,
                "state": TrialState.FAIL if speedup is None else TrialState.COMPLETE,
                "reason": "it broke" if speedup is None else None,
                "candidate": candidate,
                "measurement": None if speedup is None else measurement([speedup] * 5),
                "notes": notes,
                **facts,
            }
        )
        trial.set_user_attr(RECORD, record.model_dump_json())
        self.study.tell(trial, speedup, state=optuna.trial.TrialState.FAIL if speedup is None else None)
        return record

    def run(self, count: int, speed: Speed = lambda candidate, notes: 1.0) -> list[TrialRecord]:
        """Run trials one after another until the study has ended."""
        return list(self.trials(count, speed))

    def trials(self, count: int, speed: Speed) -> Iterator[TrialRecord]:
        for _ in range(count):
            if self.ended is not None:
                return
            candidate = self.suggest()
            number = next(reversed(self.running))
            yield self.end(number, speed(candidate, self.running[number][2]))


def as_predicted(candidate: Candidate, notes: dict[str, Any]) -> float:
    return float(notes["predicted_speedup"])


def copied(study: optuna.Study) -> optuna.Study:
    """Return a copy in a storage of its own."""
    storage = optuna.storages.InMemoryStorage()
    optuna.copy_study(
        from_study_name=study.study_name, from_storage=study._storage, to_storage=storage, to_study_name="copy"
    )
    return optuna.load_study(study_name="copy", storage=storage)
