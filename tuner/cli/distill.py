"""`sdtune distill`: exit heads for a model, trained on its own continuations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from tuner.cli.options import GroupedCommand, given, keys_of, options_of
from tuner.cli.show import exits_table
from tuner.cli.terminal import (
    CONFIG_OPTION,
    QUIET,
    check_names,
    print_facts,
    print_sample,
    progress_on_stderr,
    resumable,
    use_threads,
)
from tuner.config import DistillSettings, SearchConfig, load_config
from tuner.stage_clock import spoken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.heads.plan import Distillation

OF_DISTILLATION = ("exit_layers", "training_dataset", "training_column", "timeout")
OF_THE_SEARCH = (
    "model",
    "dataset",
    "prompt_column",
    "template",
    "group_column",
    "seed",
    "dtype",
    "device",
    "threads",
    "heads",
    "tracking_uri",
)
"""Settings that are flags, of the distillation, and of the search whose held-out prompts are no training prompts."""


@click.command(cls=GroupedCommand)
@CONFIG_OPTION
@keys_of(SearchConfig)
@options_of(DistillSettings, only=OF_DISTILLATION)
@options_of(
    SearchConfig, only=OF_THE_SEARCH, positions=("model", "dataset"), flags={"heads": "--out"}, may_be_in_file=True
)
@click.option("--dry-run", is_flag=True, help="Load and check everything, show a prompt, write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace the heads asked for, and unfinished work of other settings.")
@QUIET
def distill(config_file: Path | None, dry_run: bool, overwrite: bool, **flags: Any) -> None:
    """Train heads that draft: one decoder layer for each early exit.

    The model continues the training prompts, and the heads learn its tokens; the model itself is not changed. `sdtune search`
    with the same prompts and seed then drafts with them; its held-out prompts are no training prompts. The same command resumes.

    \b
    Examples:
      sdtune distill --config configs/demo.yaml
      sdtune distill meta-llama/Llama-3.1-8B --dataset humaneval --training-dataset prompts.jsonl --timeout 30m
    """
    flags |= {f"distillation.{name}": flags.pop(name) for name in OF_DISTILLATION}
    config = load_config(config_file, given(SearchConfig, flags))
    check_names(model=config.model, revision=config.revision, dataset=config.dataset)

    from tuner.heads.distill import distil_and_track
    from tuner.heads.plan import prepare
    from tuner.tracking import ui_command

    use_threads(config.threads)
    results = Console()
    with resumable(), progress_on_stderr() as progress:
        work = prepare(config, progress)
        finished = {} if overwrite else work.finished()
        missing = [exit_layer for exit_layer in work.exits if exit_layer not in finished]
        if missing:
            progress.say(_estimate(work, missing))
        if dry_run:
            _print_plan(results, work, missing)
            return
        made = distil_and_track(work, missing, config, progress, overwrite=overwrite) if missing else None
    results.print(exits_table(dict(sorted({**finished, **(made.facts if made else {})}.items()))))
    if finished:
        results.print(f"already trained with these settings: {', '.join(map(str, finished))}")
    if made is not None:
        print_facts(
            results,
            cost=f"{made.writing_seconds:.0f} s of sampling continuations, {made.training_seconds:.0f} s of training",
            review=ui_command(config.tracking_uri),
        )
    print_facts(results, heads=f"{config.heads}   (sdtune search --set heads={config.heads})")


def _estimate(work: Distillation, exits: Sequence[int]) -> str:
    from tuner.heads.plan import expected_time

    expected = expected_time(work, exits)
    at_most = f"; --timeout ends it after {spoken(limit)}" if (limit := work.settings.timeout) else ""
    return (
        f"about {spoken(expected.total)} for {len(exits)} {_heads(exits)} (estimate, less what is stored): texts "
        f"{spoken(expected.writing)}, training {spoken(expected.training)}{at_most}"
    )


def _heads(exits: Sequence[int]) -> str:
    return "head" if len(exits) == 1 else "heads"


def _print_plan(console: Console, work: Distillation, missing: Sequence[int]) -> None:
    texts = work.training_texts
    print_facts(
        console,
        heads=f"{work.folder}: {len(missing)} to train: {', '.join(map(str, missing))}",
        prompts=f"{len(texts.prompts)} to train on, {texts.samples} continuations of {texts.response_tokens} tokens each; "
        f"{len(work.prompts.held_out)} held out for the evaluation",
    )
    print_sample(console, work.training_prompts, work.loaded.tokenizer)
    console.print("dry run: nothing was written")
