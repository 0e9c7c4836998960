"""What long work tells whoever is watching: the command line draws it (`tuner.cli.progress_bar`), tests keep it quiet."""

from __future__ import annotations

from typing import Protocol

from studies.contract import TrialRecord


class Progress(Protocol):
    """The watcher of a search or a distillation."""

    def stage(self, name: str, total: int | None = None) -> None:
        """A new stage of `total` steps begins."""

    def advance(self, steps: int = 1) -> None:
        """Some steps of the stage are done."""

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """A trial has finished; `best` is the best so far."""

    def show(self, text: str) -> None:
        """What stands behind the bar, until the next stage or text."""

    def say(self, line: str) -> None:
        """Something worth a line of its own."""


class Unwatched:
    """Nobody is watching."""

    def stage(self, name: str, total: int | None = None) -> None:
        """Nothing."""

    def advance(self, steps: int = 1) -> None:
        """Nothing."""

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """Nothing."""

    def show(self, text: str) -> None:
        """Nothing."""

    def say(self, line: str) -> None:
        """Nothing."""
