"""`sdtune evaluate`: the research commands, one per entry of `EVALUATIONS`. Their options come from their documents."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from tuner.cli.options import GroupedCommand, given, options_of, settings_from
from tuner.cli.terminal import CONFIG_OPTION, print_results, progress_on_stderr, quieten_optuna, resumable, use_threads
from tuner.config import SearchConfig, load_config
from tuner.evaluation.contract import Evaluation
from tuner.evaluation.registry import EVALUATIONS, resolve


class EvaluationGroup(click.Group):
    """Group with one command per registered evaluation, made when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the evaluations."""
        return list(EVALUATIONS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of an evaluation, or None for an unknown name."""
        return command_of(cmd_name, resolve(cmd_name)) if cmd_name in EVALUATIONS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the evaluations and the first lines of their docstrings, in full."""
        summaries = {name: inspect.getdoc(resolve(name)) or "" for name in EVALUATIONS}
        with formatter.section("Evaluations"):
            formatter.write_dl([(name, text.partition("\n")[0]) for name, text in summaries.items()])


@click.group(cls=EvaluationGroup)
def evaluate() -> None:
    """Evaluate draft-length rules, searches, predictions and the tuner itself. For research; a search needs none of it."""


def command_of(name: str, evaluation: type[Evaluation]) -> click.Command:
    """Return the command whose help is the docstring of the class and whose options are its fields."""

    def run(config_file: Path | None = None, **flags: Any) -> None:
        if evaluation.search_keys:
            flags["config"] = load_config(
                config_file, given(SearchConfig, {key: flags.pop(key) for key in evaluation.search_keys})
            )
        settings = settings_from(evaluation, flags)
        quieten_optuna()
        use_threads(settings.num_threads)
        with resumable() if settings.is_resumable else nullcontext(), progress_on_stderr() as progress:
            report = settings.run(progress)
        print_results(report.shown, settings.results, width=report.width)
        if not report.succeeded:
            click.get_current_context().exit(1)

    decorated = options_of(evaluation)(run)
    if evaluation.search_keys:
        decorated = options_of(SearchConfig, only=evaluation.search_keys, may_be_in_file=True)(decorated)
        decorated = CONFIG_OPTION(decorated)
    return click.command(name, cls=GroupedCommand, help=inspect.getdoc(evaluation))(decorated)
