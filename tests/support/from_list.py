"""A study that proposes what it is given, and an executor whose trials end in an order of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import optuna

from studies.contract import Candidate, Study, StudySetup, TrialRecord
from tests.support.benches import first_block
from tests.support.records import candidate
from tuner.executors.contract import DeviceLostError, TrialDevice, Work


class FromList(Study):
    """Proposes the given skip sets in order, beside the running ones if `together`."""

    def __init__(self, sets: Sequence[Sequence[int]], *, together: bool = True, name: str = "from_list") -> None:
        self._sets, self._together, self.name = list(sets), together, name
        self.num_proposed = 0
        self.observed: list[int] = []
        self.beside: list[list[int]] = []

    def setup(self) -> StudySetup:
        return StudySetup({}, optuna.samplers.RandomSampler(seed=0))

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        self.num_proposed += 1
        return candidate(self._sets[self.num_proposed - 1]), {}

    def proposes_beside(self, pending: Sequence[Candidate]) -> bool:
        self.beside.append([first_block(each) for each in pending])
        return self._together

    def observe(self, record: TrialRecord) -> None:
        self.observed.append(record.number)

    def finished(self) -> str | None:
        return "all proposed" if self.num_proposed == len(self._sets) else None


class LatestFirst:
    """Two devices, on which the trial that was submitted last ends first."""

    num_devices = 2

    def __init__(self, device: TrialDevice, before: Callable[[str], None] = lambda task: None) -> None:
        self._device, self._before = device, before
        self._waiting: deque[tuple[str, Work]] = deque()
        self.most_waiting = 0
        self.submitted: list[str] = []

    def submit(self, task: str, work: Work) -> None:
        self.submitted.append(task)
        self._waiting.append((task, work))
        self.most_waiting = max(self.most_waiting, len(self._waiting))

    def wait(self) -> tuple[str, Any]:
        task, work = self._waiting.pop()
        self._before(task)
        while True:  # a lost device takes its trial up again
            try:
                return task, work(self._device)
            except DeviceLostError:
                pass
