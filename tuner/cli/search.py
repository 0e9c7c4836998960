"""`sdtune search`: from a configuration to a profile."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from studies.samplers import SAMPLERS, load_sampler
from tuner.cli.options import GroupedCommand, given, keys_of, options_of
from tuner.cli.terminal import (
    CONFIG_OPTION,
    QUIET,
    check_names,
    print_facts,
    print_sample,
    progress_on_stderr,
    quieten_optuna,
    use_threads,
)
from tuner.config import SearchConfig, load_config
from tuner.errors import without_password
from tuner.stage_clock import StageClock, spoken

if TYPE_CHECKING:
    from studies.contract import StudySettings
    from tuner.review.document import SearchResult
    from tuner.search.run import InterruptedSearchError
    from tuner.search.task import Task


FLAGS = (
    "model",
    "dataset",
    "prompt_column",
    "template",
    "tuning_prompts",
    "held_out_prompts",
    "max_new_tokens",
    "study",
    "trials",
    "timeout",
    "batch_size",
    "device",
    "threads",
    "runner",
    "exact",
    "deploy_to",
    "workers",
    "ray",
    "storage",
    "experiment",
    "out",
)
"""Settings that four users of five need; the others are keys of the YAML file, for `--set`."""


def _studies() -> dict[str, type[StudySettings]]:
    return {f"studies.{name}": load_sampler(name).Settings for name in SAMPLERS}


@click.command(cls=GroupedCommand)
@CONFIG_OPTION
@keys_of(SearchConfig, _studies)
@options_of(SearchConfig, only=FLAGS, positions=("model", "dataset"), may_be_in_file=True)
@click.option("--dry-run", is_flag=True, help="Load and check everything, print the plan, write nothing.")
@QUIET
def search(config_file: Path | None, dry_run: bool, **flags: Any) -> None:
    """Search for the fastest lossless draft and write a profile.

    Candidates decode tuning prompts in turns with plain decoding, and must give the same tokens. The winner is measured on held-out
    prompts; unless it is faster there with 95 % confidence, the profile says to decode plainly. The same command resumes.

    \b
    Examples:
      sdtune search --config configs/demo.yaml
      sdtune search --model meta-llama/Llama-3.1-8B --dataset humaneval --timeout 30m --out llama-code.yaml
      sdtune search --config configs/demo.yaml --set finalists=2 --set distillation.steps=900
    """
    clock = StageClock()
    config = load_config(config_file, given(SearchConfig, flags))
    check_names(model=config.model, revision=config.revision, dataset=config.dataset, out=config.out)

    from tuner.search.several import workers_beside
    from tuner.tracking import check_store

    check_store(config.tracking_uri)
    quieten_optuna()
    if dry_run:
        _plan(config, clock)
        return
    if config.ray is not None:
        _search_on_ray(config)
        return

    from tuner.search.run import InterruptedSearchError
    from tuner.search.run import search as run_search
    from tuner.search.task import open_budget, prepare

    with workers_beside(config, sys.argv[1:], partial(click.echo, err=True)):
        use_threads(config.threads)
        try:
            with progress_on_stderr() as progress:
                found = run_search(prepare(config, progress, budget=open_budget(config, clock)), progress)
        except InterruptedSearchError as interrupted:  # said when the bar is gone: it would draw over the message
            _print_interrupted(interrupted)
            raise KeyboardInterrupt from None
        _print_result(Console(), found, config)


def _search_on_ray(config: SearchConfig) -> None:
    from tuner.search.outcome import write_stored
    from tuner.search.several import search_on_ray

    with progress_on_stderr() as progress:
        search_on_ray(config, progress)
    _print_result(Console(), write_stored(config), config)


def _plan(config: SearchConfig, clock: StageClock) -> None:
    """Load and check everything, and print the plan of the search."""
    from tuner.search.memory_plan import memory_table, plan_memory
    from tuner.search.task import open_budget, prepare

    use_threads(config.threads)
    results = Console()
    results.print(memory_table(plan_memory(config)))
    with progress_on_stderr() as progress:
        _print_plan(results, prepare(config, progress, budget=open_budget(config, clock)))


def _print_result(results: Console, found: SearchResult, config: SearchConfig) -> None:
    from tuner.review.tables import results_table

    results.print(results_table(found))
    _print_conclusion(results, found, config)


def _print_plan(console: Console, task: Task) -> None:
    config = task.config
    target, prompts = task.target, task.prompts
    batches = f", in batches of {config.batch_size}" if config.batch_size > 1 else ""
    print_facts(
        console,
        model=f"{config.model}: {target.num_layers} layers, {target.dtype}, on {target.device}",
        prompts=f"{config.dataset}: {len(prompts.tuning)} for tuning ({config.samples_per_trial * config.batch_size} per trial), "
        f"{len(prompts.held_out)} held out, {config.max_new_tokens} tokens each{batches}",
        heads=_planned_heads(task),
    )
    print_sample(console, prompts.tuning, task.loaded.tokenizer)
    for name in config.study:
        print_facts(console, study=f"{name}: {config.study_settings(name)}")
    print_facts(
        console,
        storage=f"{without_password(config.storage)}, experiment {config.resolved_experiment()!r}",
        tracking=without_password(config.tracking_uri),
        profile=config.out,
    )
    _print_time(console, task)
    console.print("dry run: nothing was written")


def _print_time(console: Console, task: Task) -> None:
    """Print how the time will be shared, from a moment of plain decoding."""
    from tuner.search.run import plan

    if (seconds := plan(task)) is not None:
        heads = f"distillation of exit heads: about {spoken(seconds)} (--set distill=never declines)"
        console.print(heads, soft_wrap=True, highlight=False)
    for line in task.budget.lines():
        console.print(line, soft_wrap=True, highlight=False)


def _planned_heads(task: Task) -> str | None:
    if not task.heads and not task.missing_heads:
        return None
    then = "would be distilled first" if task.config.distill == "auto" else "are not used"
    missing = f"; {len(task.missing_heads)} missing ones {then}" if task.missing_heads else ""
    return f"{task.config.heads}: {len(task.heads)} found{missing}"


def _print_interrupted(interrupted: InterruptedSearchError) -> None:
    if interrupted.best is None:
        click.echo("sdtune: stopped before a trial was finished", err=True)
        return
    best = interrupted.best
    click.echo(
        f"sdtune: stopped; best so far {best.speedup:.2f}x on tuning prompts: {best.candidate.describe()}",
        err=True,
    )
    if interrupted.out is not None:
        click.echo(f"sdtune: unconfirmed profile written to {interrupted.out}; the same command resumes", err=True)


def _print_conclusion(console: Console, found: SearchResult, config: SearchConfig) -> None:
    """Print what the tables do not show: why the studies ended, the time, the verdict, and what to do now."""
    from tuner.review.verdict import verdict
    from tuner.tracking import searches_address, ui_lines

    for name, reason in found.ended.items():
        print_facts(console, search=f"{name}: {reason}")
    if found.no_comparison is not None and config.stock:
        print_facts(console, generate=f"not compared with transformers' generate: {found.no_comparison}")
    stages = ", ".join(f"{stage} {spoken(seconds)}" for stage, seconds in found.stages.items())
    seconds = found.cost.distillation_seconds
    heads = f" (and once {spoken(seconds)} of distilling exit heads)" if seconds else ""
    print_facts(console, time=f"{spoken(sum(found.stages.values()))}, {found.cost.trials} trials{heads}: {stages}")
    engine = found.profile.provenance.engine if found.profile.provenance else None
    if engine is not None:
        print_facts(console, engine=f"race and held-out figures were measured in {engine.name} {engine.version}")
    conclusion = verdict(found)
    for caution in conclusion.cautions:
        print_facts(console, care=caution)
    print_facts(console, verdict=Text(conclusion.headline, style="bold"))
    print_facts(
        console,
        profile=f"{config.out}{'' if found.profile.draft.drafts else ', which decodes plainly'}",
        **(_uses(found, config) if conclusion.ship else {"now": TRY}),
        review=None if found.address is None else ui_lines(config.tracking_uri, found.address),
        compare=None if found.address is None else searches_address(found.address),
    )


TRY = (
    "try more prompts (a narrower interval), prompts like production's, a longer --max-new-tokens, --runner static, or "
    "--dtype bfloat16 on a GPU"
)
"""What may give a speed-up where a search found none."""


def _uses(found: SearchResult, config: SearchConfig) -> dict[str, str]:
    """Return how to try and deploy the profile of a search."""
    out = config.out
    exports = f"sdtune export {out} --to {config.deploy_to or 'folder'} --out DIR"
    if config.deploy_to == "vllm":
        exports = f"sdtune show {out} for vLLM with the plugin, or {exports}"
    promotion = f"sdtune promote {found.run_id} --name NAME --why REASON"
    return {
        "try": f"sdtune generate {out} --prompt TEXT --compare",
        "use": f'model.generate(**inputs, custom_generate=load_decoder("{out}")), after: from decoding.deploy import load_decoder',
        "serve": f"sdtune serve {out}",
        "deploy": f"{promotion}, or {exports}",
    }
