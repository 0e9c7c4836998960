"""What commands share: cheap checks of names, progress on stderr (a bar per stage), results on stdout, settings of the process.

Imports torch and optuna only when they are needed.
"""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from decoding.profile import DraftProfile
from tuner.cli.options import GroupedOption
from tuner.inputs.datasets import refuse_unknown
from tuner.inputs.model_folder import check_folder, check_on_hub
from tuner.output_paths import check_writable
from tuner.progress import Progress

if TYPE_CHECKING:
    from studies.contract import TrialRecord
    from tuner.inputs.prompts import Prompt

CallableT = TypeVar("CallableT", bound=Callable[..., Any])
CONFIG_OPTION = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    cls=GroupedOption,
    heading="Configuration",
    help="YAML file with any of these settings, and settings of the studies; flags win.",
)


def _switch(*names: str, help: str) -> Callable[[CallableT], CallableT]:
    """Return an option of many commands, whose presence `is_asked` tells."""

    def note(context: click.Context, option: click.Parameter, is_given: bool) -> None:
        context.meta[f"sdtune.{option.name}"] = is_given

    return click.option(*names, is_flag=True, expose_value=False, callback=note, help=help)


QUIET = _switch("-q", "--quiet", help="Print no progress.")
JSON = _switch("--json", help="Print JSON.")


def is_asked(option: str) -> bool:
    """Return whether the running command was given the switch of this name."""
    return bool(click.get_current_context().meta.get(f"sdtune.{option}"))


def print_json(data: Any) -> None:
    """Print data, in ASCII: a terminal obeys none of it."""
    click.echo(json.dumps(data, indent=2))


def use_threads(threads: int | None) -> None:
    """Set the number of CPU threads of torch, unless it is None; say so if the machine has fewer cores."""
    if threads is not None:
        import torch

        cores = os.cpu_count() or threads
        if threads > cores:
            click.echo(f"sdtune: --threads {threads}, but there are {cores} cores: give {cores} or fewer", err=True)
        torch.set_num_threads(threads)


def quieten_optuna() -> None:
    """Keep optuna from reporting studies and failed trials on stderr, where the progress bar is."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)


@contextmanager
def resumable() -> Iterator[None]:
    """Say on Ctrl-C that the same command resumes the work. To be entered before the progress bar, which would draw over it."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("sdtune: stopped; the same command resumes", err=True)
        raise


def visible(text: str, *, lines: bool = False) -> str:
    """Return text of others with all that a terminal would obey written out, as `\\x1b`; ends of `lines` are kept if asked for."""
    return "".join(
        each
        if each.isprintable() or unicodedata.category(each) == "Zs" or (lines and each == "\n")
        else each.encode("unicode_escape").decode()
        for each in text
    )


def print_facts(console: Console, **facts: Any) -> None:
    """Print one line per fact: its name, and what is known. Brackets are printed as they are; a `Text` may have a style."""
    for name, fact in facts.items():
        if fact is not None:
            line = Text.assemble(f"{name:<8} ", fact if isinstance(fact, Text) else visible(str(fact), lines=True))
            console.print(line, soft_wrap=True, highlight=False)


LONGEST_SHOWN = 1200
"""Characters of a prompt that are shown; of a longer one, the beginning and the end."""


def print_sample(console: Console, prompts: Sequence[Prompt], tokenizer: Any) -> None:
    """Print the first of the prompts with its special tokens, indented, after its row, length and category.

    Control characters are written out.
    """
    prompt = prompts[0]
    category = f", category {visible(prompt.category)}" if prompt.category else ""
    console.print(
        f"sample   row {prompt.row}, {len(prompt.token_ids)} tokens{category}:", highlight=False, markup=False
    )
    for line in shortened(tokenizer.decode(prompt.token_ids)).split("\n"):
        console.print(f"         {visible(line)}", highlight=False, markup=False, soft_wrap=True)


def shortened(text: str) -> str:
    """Return a text of bearable length: of a long one, the beginning and the end."""
    if len(text) <= LONGEST_SHOWN:
        return text
    half = LONGEST_SHOWN // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def check_names(
    *,
    model: str | None = None,
    revision: str | None = None,
    dataset: str | None = None,
    profile: Path | None = None,
    out: Path | None = None,
) -> None:
    """Raise `SdtuneError` for a profile that cannot be read, or a model, dataset or output that is surely not there.

    Without a `model` the profile's is meant. The hub is asked last, as it may take seconds.
    """
    if profile is not None:
        target = DraftProfile.load(profile).target
        model, revision = model or target.model, revision or target.revision
    if model is not None:
        check_folder(model)
    if dataset is not None:
        refuse_unknown(dataset)
    if out is not None:
        check_writable(out)
    if model is not None:
        check_on_hub(model, revision)


BAR_WIDTH = 24
COUNTERS_WIDTH = BAR_WIDTH + 28
"""Columns of the bar, the counts and the two times, with the blanks between them."""
LEAST_WIDTH = 12
"""Columns that the name of a stage gets in a narrow terminal."""


class TerminalProgress(Progress):
    """`Progress` on a rich console, to be used as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        width = max(console.width - COUNTERS_WIDTH, LEAST_WIDTH)
        name = Column(no_wrap=True, overflow="ellipsis", max_width=width)
        self._bar = _WithRemark(
            TextColumn("{task.description}", markup=False, table_column=name),
            BarColumn(bar_width=BAR_WIDTH),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
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
            self.say(name if total is None else f"{name} ({total})")
        self._bar.start()  # not before the first stage: an error of the settings is then a single line
        self._task = self._bar.add_task(name, total=total, remark="")

    def advance(self, steps: int = 1) -> None:
        if self._task is not None:
            self._bar.advance(self._task, steps)

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """Move the bar and show the best so far; a failed trial gets a line with its reason."""
        self.advance()
        if best is not None:
            self.show(f"best {best.speedup:.2f}x, {best.candidate.describe()}")
        if record.state == "FAIL" or not self._console.is_terminal:
            self.say(f"  {record.describe()}")

    def show(self, text: str) -> None:
        if self._task is not None:
            self._bar.update(self._task, remark=text)

    def say(self, line: str) -> None:
        """Print a line as it is, brackets included; off a terminal with the time of day."""
        shown = line if self._console.is_terminal else f"{datetime.now():%H:%M:%S} {line}"
        self._console.print(visible(shown, lines=True), markup=False, highlight=False, soft_wrap=True)


class _WithRemark(Bars):
    """Bars, and the remark of the last one on a line of its own, so that no counter is cut for it."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.tasks and (remark := self.tasks[-1].fields["remark"]):
            yield Text(remark, no_wrap=True, overflow="ellipsis")


@contextmanager
def progress_on_stderr() -> Iterator[Progress]:
    if is_asked("quiet"):
        yield Progress()
        return
    with TerminalProgress(Console(stderr=True)) as progress:
        yield progress
