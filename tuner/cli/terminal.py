"""What commands share: progress on stderr, results on stdout, and settings of the process.

Imports torch and optuna only when they are needed.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.text import Text

from tuner.cli.options import GroupedOption
from tuner.progress import Progress

CONFIG_OPTION = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    cls=GroupedOption,
    heading="Configuration",
    help="YAML file with any of these settings, and settings of the studies; flags win.",
)


@contextmanager
def progress_on_stderr() -> Iterator[Progress]:
    """Draw progress bars on stderr while the context lasts."""
    from tuner.cli.progress_bar import TerminalProgress

    with TerminalProgress(Console(stderr=True)) as progress:
        yield progress


def print_results(shown: RenderableType, out: Path | None, *, width: int = 0) -> None:
    """Print results on stdout, as wide as the terminal or `width`, whichever is wider, and the place where they were written."""
    console = Console(width=max(Console().width, width))
    console.print(shown, highlight=False)
    if out is not None:
        print_facts(console, results=out)


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
