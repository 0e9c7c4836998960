"""`sdtune bench`: a profile beside plain decoding and transformers' own ways to generate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from tuner.bench.config import BenchConfig
from tuner.cli.early_checks import check_names
from tuner.cli.options import GroupedCommand, options_of, settings_from
from tuner.cli.prompt_sample import print_sample
from tuner.cli.terminal import print_facts, print_results, progress_on_stderr, use_threads
from tuner.errors import EngineError

if TYPE_CHECKING:
    from tuner.bench.task import BenchTask


@click.command(cls=GroupedCommand)
@options_of(BenchConfig)
@click.option("--dry-run", is_flag=True, help="Load and check everything, show a prompt, write nothing.")
def bench(dry_run: bool, **flags: Any) -> None:
    """Compare a profile with what you would use instead.

    All contenders continue the same held-out prompts greedily, in one process, in turns, with one stopwatch; prefill and
    decode phase are timed apart. The table shows decoded tokens per second, the speed-up over plain decoding, the profile's
    speed-up over each contender, and how many outputs equal plain decoding's.

    \b
      profile            as `load_decoder` runs it; always there
      plain              our own loop, one token per pass; always there, the reference
      hf                 transformers' generate, greedy, with its default cache
      hf-early-exit      generate(assistant_early_exit=N), with the N that is fastest on tuning prompts
      hf-prompt-lookup   generate(prompt_lookup_num_tokens=10)
      hf-static          generate(cache_implementation="static"), which transformers compiles on CUDA
      plain-eager, profile-static, profile-bitwise ...     plain or profile with another of our runners

    A contender that this model or device cannot run is left out; the table gives the reason. With columns and seed as in
    the search, the prompts are those that it held out: the profile records the numbers of prompts and a fingerprint, and
    the table says whether they match. With --batch-size, seconds run until the last sequence of a batch ends; each sequence
    is compared with what plain decoding generates from its prompt alone. hf-early-exit, hf-prompt-lookup and bit-exact mode
    decode one sequence at a time, and are not run in batches.

    With --engine the profile is exported, and the export measured in that engine: its server is started with and without
    the draft, both continue the held-out prompts in turns, and the texts are compared. This writes engine.json and
    engine.txt, and leaves the export in OUT/export; the status is 2 if a text differs.

    With --sequences too, a server of each draft length is measured with that many requests side by side, by the wall clock of
    all together. The schedule [[first, last, tokens], ...] says how many tokens to draft at each number of sequences, 0 where no
    draft is proved to be faster; `sdtune export --schedule OUT/engine.json` writes it for an engine that has one.

    Without --engine, writes bench.json (all figures and samples), bench.txt (the table) and bench.png into the folder --out.

    \b
    Examples:
      sdtune bench --profile profile.yaml --dataset configs/demo/prompts.jsonl --group-column file
      sdtune bench --profile llama-code.yaml --dataset humaneval --against hf,hf-static
      sdtune bench --profile llama-code.yaml --dataset humaneval --against plain-static,hf --batch-size 8
      sdtune bench --profile profile.yaml --dataset prompts.jsonl --engine llama.cpp --engine-home llama.cpp --threads 4
      sdtune bench --profile profile.yaml --dataset prompts.jsonl --engine vllm --sequences 1 --sequences 4 --sequences 8
    """
    config = settings_from(BenchConfig, flags)
    check_names(profile=config.profile, model=config.model, dataset=config.dataset)

    from tuner.bench.in_engine.loads import check_groups
    from tuner.bench.run import run_and_write
    from tuner.bench.settings_check import check_bench_settings
    from tuner.bench.task import prepare_bench

    use_threads(config.threads)
    with progress_on_stderr() as progress:
        if dry_run:
            check_bench_settings(config)
            task = prepare_bench(config, config.profile, progress)
            check_groups(config.sequences, len(task.measured))
            _print_plan(task)
            return
        if config.engine is not None:
            from tuner.bench.in_engine.run import run_and_write_in_engine

            shown, result = run_and_write_in_engine(config, config.profile, config.out, progress=progress)
        else:
            shown, result = run_and_write(config, config.profile, config.out, progress=progress), None
    print_results(shown, config.out)
    if result is not None and result.num_different:
        raise EngineError(f"{result.num_different} texts differ from {result.title}'s own plain decoding")


def _print_plan(task: BenchTask) -> None:
    console = Console()
    print_facts(
        console,
        profile=task.config.profile,
        prompts=f"{task.config.dataset}: {len(task.measured)} to measure, {len(task.choosing)} to choose options on, "
        f"{task.max_new_tokens} tokens each",
    )
    print_sample(console, task.choosing, task.loaded.tokenizer)
    against = task.names if task.config.engine is None else (f"{task.config.engine}'s own plain decoding",)
    print_facts(console, against=", ".join(against), results=task.config.out)
    console.print("dry run: nothing was written")
