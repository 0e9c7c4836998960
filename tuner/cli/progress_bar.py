"""Progress in the terminal: one bar per stage with the best so far. On stderr, so that stdout holds results."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from studies.contract import TrialRecord, TrialState


class TerminalProgress:
    """`tuner.progress.Progress` on a rich console, to be used as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[remark]}"),
            console=console,
            transient=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> TerminalProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._bar.stop()

    def stage(self, name: str, total: int | None = None) -> None:
        """Close the bar of the last stage and open the next."""
        if self._task is not None:
            self._bar.stop_task(self._task)
        if not self._console.is_terminal:
            self._console.print(name if total is None else f"{name} ({total})")
        self._bar.start()  # not before the first stage: an error of the settings is then a single line
        self._task = self._bar.add_task(name, total=total, remark="")

    def advance(self, steps: int = 1) -> None:
        """Move the bar."""
        if self._task is not None:
            self._bar.advance(self._task, steps)

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """Move the bar and show the best so far; a failed trial gets a line with its reason."""
        self.advance()
        if best is not None:
            self.show(f"best {best.speedup:.2f}x, {best.candidate.draft.describe()}")
        if record.state is TrialState.FAIL:
            self.say(f"trial {record.study}/{record.number} failed: {record.reason}")
        elif not self._console.is_terminal:
            shown = f"{record.speedup:.2f}x" if record.speedup else record.state.lower()
            again = f" (repeats trial {record.repeat_of})" if record.repeat_of is not None else ""
            self._console.print(
                f"  {record.study}/{record.number}: {shown}{again}  {record.candidate.draft.describe()}"
            )

    def show(self, text: str) -> None:
        """Show `text` after the bar."""
        if self._task is not None:
            self._bar.update(self._task, remark=text)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(line, highlight=False)
