"""Limits of a study: how many trials it may run, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from studies.contract import TrialRecord


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
