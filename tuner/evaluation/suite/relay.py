"""Progress of a process shown by another: each report is one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import IO, Any

from studies.contract import TrialRecord
from tuner.progress import Progress


class RelayedProgress:
    """Progress that writes each report to a file, for `replay` in another process."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def stage(self, name: str, total: int | None = None) -> None:
        """See `Progress.stage`."""
        self._write(stage=[name, total])

    def advance(self, steps: int = 1) -> None:
        """See `Progress.advance`."""
        self._write(advance=[steps])

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """See `Progress.trial`."""
        self._write(trial=[each and each.model_dump(mode="json") for each in (record, best)])

    def show(self, text: str) -> None:
        """See `Progress.show`."""
        self._write(show=[text])

    def say(self, line: str) -> None:
        """See `Progress.say`."""
        self._write(say=[line])

    def _write(self, **report: list[Any]) -> None:
        print(json.dumps(report), file=self._file, flush=True)


def replay(report: Mapping[str, list[Any]], progress: Progress) -> None:
    """Repeat a report of `RelayedProgress`. Raises KeyError for any other."""
    ((kind, values),) = report.items()
    if kind == "trial":
        record, best = values
        progress.trial(TrialRecord.model_validate(record), best and TrialRecord.model_validate(best))
        return
    receivers: Mapping[str, Callable[..., None]] = {
        "stage": progress.stage,
        "advance": progress.advance,
        "show": progress.show,
        "say": progress.say,
    }
    receivers[kind](*values)
