"""`sdtune bench`: a profile beside plain decoding and transformers' own ways to generate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from tuner.bench.config import BenchConfig
from tuner.cli.options import GroupedCommand, keys_of, options_of, settings_from
from tuner.cli.terminal import (
    JSON,
    QUIET,
    check_names,
    is_asked,
    print_facts,
    print_sample,
    progress_on_stderr,
    use_threads,
)
from tuner.errors import EngineError

if TYPE_CHECKING:
    from tuner.bench.task import BenchTask


FLAGS = (
    "model",
    "dataset",
    "prompt_column",
    "template",
    "group_column",
    "tuning_prompts",
    "held_out_prompts",
    "max_new_tokens",
    "against",
    "prompts",
    "batch_size",
    "engine",
    "engine_home",
    "engine_args",
    "runner",
    "device",
    "threads",
    "out",
)
"""Settings that are flags; the others are for `--set`."""


@click.command(cls=GroupedCommand)
@keys_of(BenchConfig)
@options_of(BenchConfig, only=FLAGS, positions=("profile", "dataset"))
@click.option("--dry-run", is_flag=True, help="Load and check everything, show a prompt, write nothing.")
@QUIET
@JSON
def bench(dry_run: bool, **flags: Any) -> None:
    """Compare a profile with plain decoding and with other ways to decode, on the prompts that its search held out.

    All contenders continue the same prompts greedily, in turns, in one process. The table shows decoded tokens per second, the
    speed-up over plain decoding, the profile's speed-up over each contender, and how many outputs are identical.

    \b
      hf                 transformers' generate, greedy, with its default cache
      hf-prompt-lookup   generate(prompt_lookup_num_tokens=10)
      hf-static          generate(cache_implementation="static"), which transformers compiles on CUDA
      plain-eager, profile-static, profile-bitwise ...     plain or profile with another of our runners

    With --engine the profile's export is measured in that engine, against the engine's own plain decoding; `sdtune tune --profile`
    measures it with several requests side by side.

    \b
    Examples:
      sdtune bench profile.yaml --dataset configs/demo/prompts.jsonl --group-column file
      sdtune bench llama-code.yaml --dataset humaneval --against hf,hf-static
      sdtune bench profile.yaml --dataset prompts.jsonl --engine llama.cpp --engine-home llama.cpp --threads 4
    """
    config = settings_from(BenchConfig, flags)
    check_names(profile=config.profile, model=config.model, dataset=config.dataset)

    from tuner.bench.config import check_bench_settings
    from tuner.bench.run import run_and_write
    from tuner.bench.task import prepare_bench

    use_threads(config.threads)
    with progress_on_stderr() as progress:
        if dry_run:
            check_bench_settings(config)
            task = prepare_bench(config, progress)
            _print_plan(task)
            return
        shown, written, wrong = run_and_write(config, progress=progress)
    if is_asked("json"):
        click.echo(written.read_text(encoding="utf-8"))
    else:
        Console().print(shown, highlight=False)
        print_facts(Console(), results=config.out)
    if wrong is not None:
        raise EngineError(wrong)


def _print_plan(task: BenchTask) -> None:
    console = Console()
    print_facts(
        console,
        profile=task.config.profile,
        prompts=f"{task.config.dataset}: {len(task.measured)} to measure, {task.max_new_tokens} tokens each",
    )
    print_sample(console, task.measured, task.loaded.tokenizer)
    against = task.names if task.config.engine is None else (f"{task.config.engine}'s own plain decoding",)
    print_facts(console, against=", ".join(against), results=task.config.out)
    console.print("dry run: nothing was written")
