"""Progress reports of long operations.

The command line draws them (`tuner.cli.terminal`); `Progress` itself ignores them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from studies.contract import TrialRecord


class Progress:
    """Receiver of the progress of a search or a distillation, which ignores what it does not override."""

    def stage(self, name: str, total: int | None = None) -> None:
        """Begin a stage of `total` steps; None if the number is unknown."""

    def advance(self, steps: int = 1) -> None:
        """Count `steps` finished steps of the stage."""

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """Report a finished trial and the best one so far."""

    def show(self, text: str) -> None:
        """Show `text` after the bar, until the next stage or text."""

    def say(self, line: str) -> None:
        """Print a line that stays."""
