"""Progress in the terminal: one bar per stage with the best so far. On stderr, so that stdout holds results."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from studies.contract import TrialRecord, TrialState
from tuner import progress
from tuner.cli.terminal import visible

BAR_WIDTH = 24
COUNTERS_WIDTH = BAR_WIDTH + 28
"""Columns of the bar, the counts and the two times, with the blanks between them."""
LEAST_WIDTH = 12
"""Columns that the name of a stage gets in a narrow terminal."""


class TerminalProgress(progress.Progress):
    """`tuner.progress.Progress` on a rich console, to be used as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = _WithRemark(
            TextColumn("{task.description}", markup=False, table_column=_whole_or_cut(console.width - COUNTERS_WIDTH)),
            BarColumn(bar_width=BAR_WIDTH),
            MofNCompleteColumn(table_column=_whole()),
            TimeElapsedColumn(table_column=_whole()),
            TimeRemainingColumn(table_column=_whole()),
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
        if self._task is not None:
            self._bar.stop_task(self._task)
        if not self._console.is_terminal:
            self._log(name if total is None else f"{name} ({total})")
        self._bar.start()  # not before the first stage: an error of the settings is then a single line
        self._task = self._bar.add_task(name, total=total, remark="")

    def advance(self, steps: int = 1) -> None:
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
            self._log(f"  {record.study}/{record.number}: {shown}{again}  {record.candidate.draft.describe()}")

    def show(self, text: str) -> None:
        if self._task is not None:
            self._bar.update(self._task, remark=text)

    def say(self, line: str) -> None:
        self._log(line)

    def _log(self, line: str) -> None:
        """Print a line as it is, brackets included; off a terminal with the time of day."""
        shown = line if self._console.is_terminal else f"{datetime.now():%H:%M:%S} {line}"
        self._console.print(visible(shown, lines=True), markup=False, highlight=False, soft_wrap=True)


class _WithRemark(Progress):
    """Bars, and the remark of the last one on a line of its own, so that no counter is cut for it."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.tasks and (remark := self.tasks[-1].fields["remark"]):
            yield Text(remark, no_wrap=True, overflow="ellipsis")


def _whole() -> Column:
    return Column(no_wrap=True)


def _whole_or_cut(width: int) -> Column:
    return Column(no_wrap=True, overflow="ellipsis", max_width=max(width, LEAST_WIDTH))
