"""What commands share: cheap checks of names, progress on stderr, results on stdout, and settings of the process.

Imports torch and optuna only when they are needed.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from decoding.profile import DraftProfile
from tuner.cli.options import GroupedOption
from tuner.inputs.datasets import refuse_unknown
from tuner.inputs.model_folder import check_folder, check_on_hub
from tuner.output_paths import check_writable
from tuner.progress import Progress

if TYPE_CHECKING:
    from tuner.inputs.prompts import Prompt


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
    from tuner.cli.progress_bar import TerminalProgress

    with TerminalProgress(Console(stderr=True)) as progress:
        yield progress


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
