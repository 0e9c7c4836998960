"""The command `sdtune`: the only file of the tuner that imports click. Every command is a thin shell over the package.

What the user can put right (`SdtuneError`) becomes one line on stderr and exit status 2; Ctrl-C ends with status 130.
Heavy libraries are imported by the command that needs them, so `--help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from decoding.errors import SdtuneError
from studies.searches.registry import DEFAULT_STUDIES, STUDIES, compared_searches

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

RUNNER_OPTION = click.option(
    "--runner",
    type=click.Choice(["auto", "eager", "static"]),
    help="How passes are executed: eager as they are; static in fixed shapes, compiled (CUDA graphs on a GPU); auto times both "
    "and takes the faster.  [default: eager]",
)


class _Group(click.Group):
    """Turns errors of ours into one line and a status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SdtuneError as error:
            click.echo(f"sdtune: {' '.join(str(error).split())}", err=True)
            ctx.exit(EXIT_BAD_INPUT)
        except click.UsageError as error:
            place = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
            click.echo(f"sdtune: {' '.join(error.format_message().split())}{place}", err=True)
            ctx.exit(EXIT_BAD_INPUT)
        except (KeyboardInterrupt, click.Abort):
            click.echo("sdtune: interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="sdtune")
def main() -> None:
    """Find the fastest lossless self-speculative decoding setting of a model, and use it.

    \b
      sdtune doctor --model M                    can this model be tuned?
      sdtune search --model M --dataset D        find a setting, write profile.yaml
      sdtune distill --model M --dataset D       train exit heads for it beforehand
      sdtune show profile.yaml                   what was found
      sdtune generate --profile profile.yaml --prompt TEXT --compare
      sdtune bench --profile profile.yaml --dataset D     is it faster than what you would use instead?
      sdtune compare-rules, compare-searches     which rule, which search is better here?
      sdtune check-predictions, check-integrity, check-planted     can the tuner be trusted?

    In production: model.generate(**inputs, custom_generate=load_decoder("profile.yaml")) with load_decoder from
    decoding.deploy.
    """


@main.command()
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="YAML file with the settings below; flags win."
)
@click.option("--model", help="Folder or hub id of a causal language model.")
@click.option("--revision", help="Revision of the model on the hub.")
@click.option(
    "--dataset", help="Prompts: .jsonl, .json, .csv, .parquet, .txt, a saved datasets folder, a hub id, or a preset."
)
@click.option(
    "--study",
    multiple=True,
    metavar="NAME",
    help="Searches to run, in order; repeatable: " + ", ".join(STUDIES) + f".  [default: {', '.join(DEFAULT_STUDIES)}]",
)
@click.option("--trials", type=int, metavar="N", help="Trials of each study at most.")
@click.option(
    "--timeout", metavar="DURATION", help="Search time over all studies, e.g. 90s, 10m, 1h; resumed runs included."
)
@click.option("--max-new-tokens", type=int, metavar="N", help="Tokens to generate from each prompt.  [default: 64]")
@click.option("--tuning-prompts", type=int, metavar="N", help="Prompts to search and race on.  [default: 24]")
@click.option("--held-out-prompts", type=int, metavar="N", help="Prompts for the reported figures.  [default: 24]")
@click.option(
    "--batch-size",
    type=int,
    metavar="N",
    help="Prompts decoded in step, by every candidate and plainly alike: give what production will. The more there are, the less "
    "the weights that a pass reads count, and the shorter the drafts that pay. An interval is over batches: take more prompts.  "
    "[default: 1]",
)
@click.option("--prompt-column", metavar="C", help="Column that holds the prompt.  [default: guessed]")
@click.option("--group-column", metavar="C", help="Rows with the same value stay in one part of the prompts.")
@click.option(
    "--chat-template/--no-chat-template", default=None, help="Apply the tokenizer's chat template if it has one."
)
@click.option("--temperature", type=float, metavar="T", help="0 is greedy.  [default: 0]")
@click.option("--dtype", metavar="TYPE", help="auto, float32, bfloat16 or float16.  [default: auto]")
@click.option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:1 ...  [default: auto]")
@RUNNER_OPTION
@click.option(
    "--exact",
    type=click.Choice(["tokens", "bitwise"]),
    help="How drafted text equals plain text: token for token, up to numerical ties in low precision, or bit for bit, by running "
    "every pass of the whole model at one width.  [default: tokens]",
)
@click.option("--exact-width", type=int, metavar="N", help="That width: longest draft and one more.  [default: 8]")
@click.option("--threads", type=int, metavar="N", help="CPU threads for torch; small models gain nothing from many.")
@click.option(
    "--heads",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of exit heads; missing ones are made in it.  [default: exit_heads]",
)
@click.option(
    "--distill", metavar="auto|never", help="Make missing exit heads first, or search without them.  [default: auto]"
)
@click.option("--storage", metavar="URL", help="Optuna storage of the trials.  [default: sqlite:///sdtune.db]")
@click.option("--tracking-uri", metavar="URL", help="MLflow tracking store.  [default: sqlite:///mlflow.db]")
@click.option("--experiment", metavar="NAME", help="Name in storage and MLflow.  [default: model and dataset]")
@click.option("--out", type=click.Path(path_type=Path), help="Where the profile is written.  [default: profile.yaml]")
@click.option("--seed", type=int, metavar="N", help="Seed of split, samplers and sampling.  [default: 0]")
@click.option("--dry-run", is_flag=True, help="Load and check everything, say what would be done, write nothing.")
def search(config_file: Path | None, dry_run: bool, study: tuple[str, ...], **flags: Any) -> None:
    """Search for the fastest lossless draft and write a profile.

    Every candidate is scored by real speculative decoding, paired with plain decoding in the same process, and must give the
    same tokens. The finalists race on further prompts; the winner is measured on held-out ones. If it is not faster there
    with 95 % confidence, the profile says to decode plainly.

    Finished trials are on disk: the same command again goes on where it stopped, and spends what is left of its budget.

    \b
    Examples:
      sdtune search --config configs/demo.yaml
      sdtune search --model meta-llama/Llama-3.1-8B --dataset humaneval --timeout 30m --out llama-code.yaml
    """
    from tuner.cli.progress_bar import TerminalProgress
    from tuner.config import load_config
    from tuner.search.report import results_table
    from tuner.search.run import InterruptedSearchError
    from tuner.search.run import search as run_search
    from tuner.search.task import prepare
    from tuner.tracking import ui_command

    config = load_config(config_file, {**flags, "study": study or None})
    _quieten_optuna()
    _use_threads(config.threads)
    errors, results = Console(stderr=True), Console()
    with TerminalProgress(errors) as progress:
        task = prepare(config, progress)
        if dry_run:
            _print_plan(results, task)
            return
        try:
            found = run_search(task, progress)
        except InterruptedSearchError as interrupted:
            _print_interrupted(interrupted)
            raise KeyboardInterrupt from None
    results.print(results_table(found.rows))
    _print_conclusion(results, found, config.out, ui_command(config.tracking_uri))


@main.command()
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="The YAML file of the search: prompts, seed and its `distillation:` mapping; flags win.",
)
@click.option("--model", help="Folder or hub id of a causal language model.")
@click.option("--revision", help="Revision of the model on the hub.")
@click.option("--dataset", help="Prompts, as in `sdtune search`.")
@click.option("--prompt-column", metavar="C", help="Column that holds the prompt.  [default: guessed]")
@click.option("--group-column", metavar="C", help="Rows with the same value are never learnt from and judged on both.")
@click.option(
    "--chat-template/--no-chat-template", default=None, help="Apply the tokenizer's chat template if it has one."
)
@click.option(
    "--training-dataset",
    metavar="DATASET",
    help="Prompts to learn from.  [default: rows of --dataset that are in neither part]",
)
@click.option("--training-column", metavar="C", help="Column of the prompts in --training-dataset.  [default: guessed]")
@click.option("--prompts", type=int, metavar="N", help="Prompts to learn from at most.  [default: 1024]")
@click.option("--tuning-prompts", type=int, metavar="N", help="As in the search: not learnt from.  [default: 24]")
@click.option("--held-out-prompts", type=int, metavar="N", help="As in the search: judged on.  [default: 24]")
@click.option(
    "--exit-layers",
    metavar="LIST",
    help="Exits to train heads for, e.g. 2,4,6-12: behind how many layers.  [default: spread over the first half]",
)
@click.option(
    "--out",
    "heads",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the heads; those of other exits in it stay.  [default: exit_heads]",
)
@click.option("--steps", type=int, metavar="N", help="Training steps.  [default: 600]")
@click.option("--timeout", metavar="DURATION", help="Training time, e.g. 10m; the schedule is compressed to fit.")
@click.option("--batch-size", type=int, metavar="N", help="Texts a step.  [default: 4]")
@click.option("--learning-rate", type=float, metavar="R", help="At its height.  [default: 1 / hidden size]")
@click.option("--samples", type=int, metavar="N", help="Texts written from each prompt.  [default: 8]")
@click.option("--response-tokens", type=int, metavar="N", help="Tokens of a text at most.  [default: 64]")
@click.option(
    "--temperature",
    type=float,
    metavar="T",
    help="At which the texts are written; 0: greedy, one a prompt.  [default: 1]",
)
@click.option("--dtype", metavar="TYPE", help="auto, float32, bfloat16 or float16.  [default: auto]")
@click.option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:1 ...  [default: auto]")
@click.option("--threads", type=int, metavar="N", help="CPU threads for torch; small models gain nothing from many.")
@click.option("--tracking-uri", metavar="URL", help="MLflow tracking store.  [default: sqlite:///mlflow.db]")
@click.option("--experiment", metavar="NAME", help="Name in MLflow.  [default: model and dataset]")
@click.option("--seed", type=int, metavar="N", help="Seed of the split, as in the search, and of texts and batches.")
@click.option("--overwrite", is_flag=True, help="Replace the asked heads if they are there, and other unfinished work.")
def distill(config_file: Path | None, overwrite: bool, **flags: Any) -> None:
    """Train exit heads, with which the first layers draft better than alone (self-distillation, as in EESD).

    A head is one more decoder layer behind the first N. The model writes texts behind your prompts, and the head of each exit
    learns to foretell what the whole model would say there; the model itself stays as it is. All heads are trained in one
    pass. `sdtune search` with the same prompts and seed then drafts with them; the prompts that it reports on are never
    learnt from. Many different prompts make a better head than many texts of few: give a large dataset with --training-dataset.

    In memory: the model, and per exit one layer with 12 bytes a weight on top. Texts and checkpoints are on disk: the same
    command again goes on where it stopped.

    \b
    Examples:
      sdtune distill --config configs/demo.yaml
      sdtune distill --model meta-llama/Llama-3.1-8B --dataset humaneval --training-dataset prompts.jsonl --timeout 30m
    """
    from tuner.cli.progress_bar import TerminalProgress
    from tuner.config import DistillSettings, load_config
    from tuner.heads.distill import distil_and_track, prepare
    from tuner.heads.report import exits_table
    from tuner.tracking import ui_command

    how = {key: flags.pop(key) for key in DistillSettings.model_fields if key in flags}
    config = load_config(config_file, flags, how)
    _use_threads(config.threads)
    errors, results = Console(stderr=True), Console()
    with TerminalProgress(errors) as progress:
        work = prepare(config, progress)
        finished = {} if overwrite else work.finished()
        missing = [exit_layer for exit_layer in work.exits if exit_layer not in finished]
        try:
            made = distil_and_track(work, missing, config, progress, overwrite=overwrite) if missing else None
        except KeyboardInterrupt:
            click.echo("sdtune: stopped; the same command again goes on", err=True)
            raise
    results.print(exits_table(dict(sorted({**finished, **(made.facts if made else {})}.items()))))
    if finished:
        results.print(f"already there from these settings: {', '.join(map(str, finished))}")
    if made is not None:
        results.print(
            f"cost     {made.writing_seconds:.0f} s of writing texts, {made.training_seconds:.0f} s of training",
            highlight=False,
        )
        results.print(f"review   {ui_command(config.tracking_uri)}", soft_wrap=True, highlight=False)
    results.print(f"heads    {config.heads}   (sdtune search --heads {config.heads})", soft_wrap=True, highlight=False)


@main.command()
@click.argument("path", metavar="PROFILE|DIR", type=click.Path(path_type=Path))
def show(path: Path) -> None:
    """Show a profile on one screen: what is skipped, the rule, what was measured. Or the exit heads in a folder."""
    from decoding.profile import DraftProfile
    from tuner.heads.found import heads_in
    from tuner.heads.report import exits_table
    from tuner.search.report import profile_panel

    Console().print(exits_table(heads_in(path)) if path.is_dir() else profile_panel(DraftProfile.load(path)))


@main.command()
@click.option("--model", required=True, help="Folder or hub id of a causal language model.")
@click.option("--revision", help="Revision of the model on the hub.")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1 ...")
def doctor(model: str, **options: Any) -> None:
    """Probe a model: what can be skipped, and does its cache roll back? Exit status 1 if it cannot be tuned."""
    from decoding.probe import probe
    from tuner.inputs.models import load
    from tuner.search.report import capabilities_panel

    found = probe(load(model, **options).model)
    Console().print(capabilities_panel(found))
    if not found.is_supported:
        sys.exit(1)


@main.command()
@click.option("--profile", required=True, type=click.Path(path_type=Path), help="A profile that `sdtune search` wrote.")
@click.option("--model", help="Folder or hub id; default: the one the profile names.")
@click.option("--prompt", required=True, help="The text to continue.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True, metavar="N")
@click.option("--temperature", type=click.FloatRange(min=0), help="0 is greedy.  [default: the profile's]")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of the sampling.")
@click.option(
    "--chat-template/--no-chat-template", default=True, help="Apply the tokenizer's chat template if it has one."
)
@click.option("--dtype", help="Default: the profile's.")
@click.option("--device", default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads for torch.")
@click.option("--compare", is_flag=True, help="Also decode plainly; print both rates and whether the tokens agree.")
def generate(profile: Path, prompt: str, threads: int | None, **options: Any) -> None:
    """Continue a prompt with a profile, streaming the text to stdout."""
    from tuner.cli.generate_text import generate as run_generate

    _use_threads(threads)
    run_generate(profile, prompt, **options)


@main.command()
@click.option("--profile", required=True, type=click.Path(path_type=Path), help="The profile to put to the test.")
@click.option("--dataset", required=True, help="Prompts, as in `sdtune search`: those it held out are measured.")
@click.option(
    "--against",
    metavar="LIST",
    help="Whom to compare with, e.g. hf,hf-early-exit: hf, hf-early-exit, hf-prompt-lookup, hf-static, and plain or profile by "
    "another runner, e.g. plain-static,profile-bitwise; plain is always there.  [default: all hf, hf-static on CUDA only]",
)
@click.option(
    "--runner",
    type=click.Choice(["eager", "static", "bitwise"]),
    help="How profile and plain are run; bitwise is static in bit-exact mode.  [default: as the profile says]",
)
@click.option("--model", help="Folder or hub id; default: the one the profile names.")
@click.option(
    "--context", type=click.IntRange(min=1), metavar="N", help="Make prompts N tokens long.  [default: as they are]"
)
@click.option(
    "--max-new-tokens", type=click.IntRange(min=9), metavar="N", help="Tokens to generate.  [default: the profile's]"
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Prompts that are continued side by side; the others of an incomplete last batch are left out.",
)
@click.option("--prompts", type=click.IntRange(min=2), metavar="N", help="Held-out prompts to measure.  [default: all]")
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Times that all prompts are decoded.",
)
@click.option("--prompt-column", metavar="C", help="As in the search.  [default: guessed]")
@click.option("--group-column", metavar="C", help="As in the search.")
@click.option("--chat-template/--no-chat-template", default=True, help="As in the search.")
@click.option("--max-prompt-tokens", type=click.IntRange(min=1), metavar="N", help="As in the search.")
@click.option(
    "--tuning-prompts", type=click.IntRange(min=1), metavar="N", help="As in the search.  [default: the profile's]"
)
@click.option(
    "--held-out-prompts", type=click.IntRange(min=2), metavar="N", help="As in the search.  [default: the profile's]"
)
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="As in the search.")
@click.option("--dtype", help="Default: the profile's.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1 ...")
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads for torch.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("bench"),
    show_default=True,
    metavar="DIR",
    help="Folder of the results.",
)
def bench(profile: Path, against: str | None, threads: int | None, out: Path, **options: Any) -> None:
    """Compare a profile with what you would use instead.

    All decode the same held-out prompts greedily in one process, in turns, by one stopwatch; prefill and decode phase are timed
    apart. Shown are decoded tokens per second, the speed-up over plain decoding and of the profile over each, and whose text is
    that of plain decoding.

    \b
      profile            as `load_decoder` would run it; always there
      plain              our own loop, one token a pass; always there, the reference
      hf                 transformers' generate, greedy, with its default cache
      hf-early-exit      generate(assistant_early_exit=N) with the N that is fastest on tuning prompts
      hf-prompt-lookup   generate(prompt_lookup_num_tokens=10)
      hf-static          generate(cache_implementation="static"), which transformers compiles on CUDA
      plain-eager, profile-static, profile-bitwise ...     plain or the profile by another of our runners
      roofline           the most that one token a pass allows: bytes to be read over measured memory bandwidth

    What this model or device cannot run is left out, and the table says why. The profile records the numbers of prompts and
    a fingerprint: with columns and seed as in the search, the prompts are those that it held out, and the table says whether
    they are. With --context, other rows that are not held out stand in front of each prompt, and what is too long is cut from
    the left. With --batch-size, everybody writes so many texts side by side, in the order of the prompts: tokens are those of all
    texts, seconds run until the last has ended, and each text is compared with what plain decoding writes of its prompt alone.
    hf-early-exit, hf-prompt-lookup and bit-exact mode write one text at a time, and are not there then.

    Writes DIR/bench.json (all figures and samples), .txt (the table), .png (a picture).

    \b
    Examples:
      sdtune bench --profile profile.yaml --dataset configs/demo/prompts.jsonl --group-column file
      sdtune bench --profile llama-code.yaml --dataset humaneval --against hf,hf-static --context 4096
      sdtune bench --profile llama-code.yaml --dataset humaneval --against plain-static,hf --batch-size 8
    """
    from tuner.bench.report import TABLE_WIDTH
    from tuner.bench.run import run_and_write
    from tuner.bench.task import BenchConfig
    from tuner.cli.progress_bar import TerminalProgress

    _use_threads(threads)
    names = None if against is None else tuple(name.strip() for name in against.split(","))
    config = BenchConfig(against=names, **options)
    with TerminalProgress(Console(stderr=True)) as progress:
        shown = run_and_write(config, profile, out, progress=progress)
    _print_results(shown, out, TABLE_WIDTH)


@main.command("compare-rules")
@click.option(
    "--profile", required=True, type=click.Path(path_type=Path), help="A profile whose draft to compare rules on."
)
@click.option(
    "--dataset",
    "datasets",
    multiple=True,
    required=True,
    help="Prompts, as for search; repeat it to mix kinds of text.",
)
@click.option("--model", help="Folder or hub id; default: the one the profile names.")
@click.option("--prompt-column", metavar="C", help="Column that holds the prompt.  [default: guessed]")
@click.option(
    "--prompts", type=click.IntRange(min=2), default=24, show_default=True, metavar="N", help="Of each dataset."
)
@click.option(
    "--learning-prompts",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    metavar="N",
    help="Further prompts of each dataset, which teach the rules that learn.",
)
@click.option("--max-tokens", type=click.IntRange(1, 64), default=8, show_default=True, help="Longest draft (K).")
@click.option("--max-new-tokens", type=click.IntRange(min=9), default=64, show_default=True, metavar="N")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of the split and the sampling.")
@click.option("--device", default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads for torch.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write all figures and samples here, as JSON.")
def compare_rules(
    profile: Path, datasets: tuple[str, ...], threads: int | None, out: Path | None, **options: Any
) -> None:
    """Compare draft-length rules on one draft with every fixed length.

    All rules decode the same prompts side by side with plain decoding. The best fixed length is found by measuring each of
    them on those very prompts, which no user could have known: a rule that comes near it without being told is worth having,
    and on mixed kinds of text an adaptive one can be ahead.

    \b
    Example:
      sdtune compare-rules --profile profile.yaml --dataset code.jsonl --dataset prose.jsonl
    """
    from tuner.cli.progress_bar import TerminalProgress
    from tuner.errors import ConfigError
    from tuner.evaluation.rules.compare import compare_rules as run_comparison
    from tuner.evaluation.rules.compare import write_json
    from tuner.evaluation.rules.report import rules_table
    from tuner.search.task import check_writable

    if out is not None:
        check_writable(out, what="the comparison", name="comparison.json", error=ConfigError)
    _use_threads(threads)
    with TerminalProgress(Console(stderr=True)) as progress:
        comparison = run_comparison(profile, datasets, progress=progress, **options)
    if out is not None:
        write_json(comparison, out)
    Console(width=max(Console().width, 80 + 20 * len(comparison.columns))).print(rules_table(comparison))


def _of_a_check(command: CommandT) -> CommandT:
    """The options that the checks share with the search: the same configuration file, and what is most often changed in it."""
    options = [
        click.option(
            "--config",
            "config_file",
            type=click.Path(path_type=Path),
            help="The YAML file of the search: model, prompts, heads, seed; flags win.",
        ),
        click.option("--model", help="Folder or hub id of a causal language model."),
        click.option("--dataset", help="Prompts, as in `sdtune search`."),
        click.option(
            "--heads", type=click.Path(path_type=Path), metavar="DIR", help="Folder of exit heads; none are made."
        ),
        click.option(
            "--max-new-tokens", type=int, metavar="N", help="Tokens to generate from each prompt.  [default: 64]"
        ),
        click.option("--tuning-prompts", type=int, metavar="N", help="As in the search.  [default: 24]"),
        click.option("--held-out-prompts", type=int, metavar="N", help="As in the search.  [default: 24]"),
        click.option("--temperature", type=float, metavar="T", help="0 is greedy.  [default: 0]"),
        click.option("--dtype", metavar="TYPE", help="auto, float32, bfloat16 or float16.  [default: auto]"),
        click.option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:1 ...  [default: auto]"),
        RUNNER_OPTION,
        click.option("--threads", type=int, metavar="N", help="CPU threads for torch."),
        click.option("--seed", type=int, metavar="N", help="Seed of the split and of all draws.  [default: 0]"),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@main.command("check-planted")
@click.option(
    "--seeds", type=click.IntRange(min=0), default=10, show_default=True, help="Small problems; 0 leaves them out."
)
@click.option(
    "--layers",
    multiple=True,
    type=click.IntRange(min=4),
    default=(32, 80),
    show_default=True,
    metavar="N",
    help="Sizes of the large problems; repeatable.",
)
@click.option(
    "--large-seeds", type=click.IntRange(min=0), default=2, show_default=True, help="Large problems of each size."
)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads for torch.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write all figures here, as JSON.")
def check_planted(seeds: int, layers: tuple[int, ...], large_seeds: int, threads: int | None, out: Path | None) -> None:
    """Do the searches find what was planted? Random models in which it is known what can be skipped.

    Small ones, of 12 blocks: predicted and joint against the best of all sets of blocks, by real decoding that is priced from a
    table, so that the best is known. Large ones: how many of the planted sublayers the best proposal leaves out.

    The best of a seed takes minutes to find. Those that --out holds already are not looked for again.

    \b
    Example:
      sdtune check-planted --seeds 3 --threads 1
    """
    from tuner.cli.progress_bar import TerminalProgress
    from tuner.errors import SearchError
    from tuner.evaluation.planted.check import (
        Optimum,
        find_best_of_all,
        known_optima,
        recover,
        results_table,
        write_results,
    )
    from tuner.search.task import check_writable

    if out is not None:
        check_writable(out, what="the results", name="planted.json", error=SearchError)
    optima = known_optima(out) if out is not None else []

    def keep(optimum: Optimum) -> None:
        optima.append(optimum)
        if out is not None:
            write_results([], [], out, optima)

    _quieten_optuna()
    _use_threads(threads)
    with TerminalProgress(Console(stderr=True)) as progress:
        found = find_best_of_all(range(seeds), progress, optima=tuple(optima), on_optimum=keep)
        recovered = recover(layers, range(large_seeds), progress)
    if out is not None:
        write_results(found, recovered, out, optima)
    Console(width=max(Console().width, 100)).print(results_table(found, recovered))


@main.command("check-predictions")
@_of_a_check
@click.option(
    "--configurations",
    type=click.IntRange(min=2),
    default=60,
    show_default=True,
    metavar="N",
    help="Random configurations to foretell and to decode with.",
)
@click.option(
    "--prompts",
    "num_prompts",
    type=click.IntRange(min=2),
    default=16,
    show_default=True,
    metavar="N",
    help="Tuning prompts that they are foretold and decoded on, at most.",
)
@click.option("--max-tokens", type=click.IntRange(1, 64), default=12, show_default=True, help="Longest draft (K).")
@click.option(
    "--drafts",
    "num_drafts",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    metavar="N",
    help="Drafts to tune every rule for, both ways; 0 leaves that half out.",
)
@click.option(
    "--replays", "num_replays", type=click.IntRange(min=1), default=300, show_default=True, help="Settings to replay."
)
@click.option(
    "--trials",
    "num_trials",
    type=click.IntRange(min=1),
    default=12,
    show_default=True,
    help="Settings to decode with instead.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("check_predictions"),
    show_default=True,
    metavar="DIR",
    help="Folder of the results.",
)
def check_predictions(config_file: Path | None, out: Path, **options: Any) -> None:
    """How good are predicted speed-ups? Compares them with real decoding.

    First, random configurations: skip sets, exits without and with the heads that are there, prompt lookup, each with a random
    draft-length rule. All are foretold from one reading of the texts and a table of costs, then decoded with on the same
    texts. Shown are the rank correlation, the errors, and the bias: overall, by kind of draft and of rule, and with the
    correction that a search would learn on the way (from all the other configurations).

    Second, tuning: for some drafts, the best parameters of every rule by replay alone against the best by real trials of
    Optuna, side by side on held-out prompts, with the seconds that each took.

    \b
    Writes DIR/predictions.json (all figures), .txt (the tables), .csv (a line for each configuration), .png (a picture).
    It takes long: on the demo about twenty minutes for the first half and half an hour for the second.

    \b
    Examples:
      sdtune check-predictions --config configs/demo.yaml
      sdtune check-predictions --config configs/demo.yaml --configurations 20 --drafts 0
    """
    from tuner.cli.progress_bar import TerminalProgress
    from tuner.config import load_config
    from tuner.evaluation.predictions.run import run_and_write

    how = {
        name: options.pop(name)
        for name in ("configurations", "num_prompts", "max_tokens", "num_drafts", "num_replays", "num_trials")
    }
    config = load_config(config_file, options)
    _quieten_optuna()
    _use_threads(config.threads)
    with TerminalProgress(Console(stderr=True)) as progress:
        shown = run_and_write(config, out, progress=progress, **how)
    _print_results(shown, out)


@main.command("check-integrity")
@_of_a_check
@click.option(
    "--family",
    multiple=True,
    metavar="NAME",
    help="Candidates that cannot win: disguised, idle or whole; repeatable.  [default: all]",
)
@click.option(
    "--copies",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    metavar="N",
    help="Equal candidates to choose the best of.",
)
@click.option(
    "--runs", type=click.IntRange(min=1), metavar="N", help="Searches of each family.  [default: 400, or 40 if --fresh]"
)
@click.option(
    "--repetitions",
    type=click.IntRange(min=2),
    default=5,
    show_default=True,
    metavar="N",
    help="Times that each prompt is decoded for the bank that runs draw from.",
)
@click.option("--fresh", is_flag=True, help="Decode anew in every run instead of drawing from a bank: takes hours.")
@click.option(
    "--configurations",
    type=click.IntRange(min=0),
    default=30,
    show_default=True,
    metavar="N",
    help="Random configurations whose intervals are checked; 0 leaves that half out.",
)
@click.option(
    "--passes",
    type=click.IntRange(min=3),
    default=5,
    show_default=True,
    metavar="N",
    help="Times that all prompts are decoded with each of them.",
)
@click.option("--max-tokens", type=click.IntRange(1, 64), default=8, show_default=True, help="Their longest draft (K).")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("check_integrity"),
    show_default=True,
    metavar="DIR",
    help="Folder of the results.",
)
def check_integrity(config_file: Path | None, out: Path, runs: int | None, fresh: bool, **options: Any) -> None:
    """Does the tuner claim what is not there?

    First, searches among candidates that cannot win: plain decoding under other names (disguised), a rule that never drafts
    (idle), the whole model as its own draft (whole). Trials, race, confirmation and verdict are those of a search; how many
    of the runs claim a speed-up? Every prompt is decoded several times once, and the runs draw prompts and repetitions from
    that bank; with --fresh each run decodes for itself.

    Second, do intervals hold what they are of? Random configurations are decoded over all prompts in several passes. From each
    pass usual confirmations are drawn (24 prompts): does their 95 % interval hold the speed-up of all samples they do not use?

    \b
    Writes DIR/integrity.json (all figures and samples) and .txt (the tables).
    It takes long: on the demo about half an hour for the first half and two hours for the second.

    \b
    Examples:
      sdtune check-integrity --config configs/demo.yaml
      sdtune check-integrity --config configs/demo.yaml --family disguised --fresh --runs 40 --configurations 0
    """
    from tuner.cli.progress_bar import TerminalProgress
    from tuner.config import load_config
    from tuner.evaluation.integrity.run import run_and_write

    names = ("family", "copies", "repetitions", "configurations", "passes", "max_tokens")
    how = {name: options.pop(name) for name in names}
    config = load_config(config_file, options)
    _use_threads(config.threads)
    num_runs = runs if runs is not None else (40 if fresh else 400)
    with TerminalProgress(Console(stderr=True)) as progress:
        shown = run_and_write(config, out, runs=num_runs, fresh=fresh, progress=progress, **how)
    _print_results(shown, out)


def _print_results(shown: Any, out: Path, width: int = 110) -> None:
    console = Console(width=max(Console().width, width))
    console.print(shown, highlight=False)
    console.print(f"results  {out}", soft_wrap=True, highlight=False)


@main.command("compare-searches")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="The YAML file of `sdtune search`: problem and settings of the studies; flags win.",
)
@click.option("--model", help="Folder or hub id of a causal language model.")
@click.option("--dataset", help="Prompts, as in `sdtune search`.")
@click.option(
    "--search",
    "searches",
    multiple=True,
    metavar="NAME",
    help="Searches to compare: " + ", ".join(compared_searches()) + "; repeatable.  [default: all]",
)
@click.option(
    "--seeds", type=click.IntRange(min=1), default=3, show_default=True, metavar="N", help="Runs of each search."
)
@click.option(
    "--budget", metavar="DURATION", help="Of each run, e.g. 90s, 10m.  [default: 120s, unless another limit is given]"
)
@click.option("--budget-tokens", type=int, metavar="N", help="Tokens decoded in measuring, of each run.")
@click.option("--budget-trials", type=int, metavar="N", help="Trials of each run.")
@click.option("--tuning-prompts", type=int, metavar="N", help="Prompts to search on.  [default: 24]")
@click.option("--held-out-prompts", type=int, metavar="N", help="Prompts to compare on.  [default: 24]")
@click.option(
    "--heads", type=click.Path(path_type=Path), metavar="DIR", help="Folder of exit heads, taken as they are."
)
@click.option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:1 ...  [default: auto]")
@RUNNER_OPTION
@click.option("--threads", type=int, metavar="N", help="CPU threads for torch; small models gain nothing from many.")
@click.option(
    "--seed", type=int, metavar="N", help="Seed of the split, and the first of the runs' seeds.  [default: 0]"
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default="searches",
    show_default=True,
    metavar="DIR",
    help="Folder of trials, samples and report.",
)
def compare_searches(
    config_file: Path | None,
    searches: tuple[str, ...],
    seeds: int,
    budget: str | None,
    budget_tokens: int | None,
    budget_trials: int | None,
    out: Path,
    **flags: Any,
) -> None:
    """Compare searches: the same problem, the same budget, several seeds.

    Each search runs as in `sdtune search`, until its budget is spent or it says that it is finished. A seed orders the tuning
    prompts and seeds the sampler. Then whatever was the best so far of any search, at any time, is decoded on held-out prompts,
    all side by side: the figures are what was truly found, not what a search believed. What a search does before its first
    trial counts as well.

    \b
    A search is a study with its settings (`studies:` in the file), or a method of the study skip_sets;
    swift_batched is swift, measuring after every 100 candidates only.

    DIR then holds searches.csv (a line a trial), searches.png (speed-up against what was spent) and searches.json
    (everything). Trials and samples are on disk there: the same command again goes on where it stopped, and one with more seeds,
    searches, tokens or trials runs only what is missing. Another DURATION needs another DIR, as searches may plan by it.

    \b
    Example:
      sdtune compare-searches --config configs/demo.yaml --search joint --search swift --budget 60s
    """
    from decoding.documents.strict_yaml import validate
    from tuner.cli.progress_bar import TerminalProgress
    from tuner.config import load_config
    from tuner.errors import ConfigError
    from tuner.evaluation.searches.compare import compare_searches as run_comparison
    from tuner.evaluation.searches.report import searches_table, write_report
    from tuner.evaluation.searches.runs import Limits

    config = load_config(config_file, flags)
    given = {"seconds": budget, "tokens": budget_tokens, "trials": budget_trials}
    if all(limit is None for limit in given.values()):
        given["seconds"] = "120s"
    limits = validate(Limits, given, source="budget", error=ConfigError)
    _quieten_optuna()
    _use_threads(config.threads)
    with TerminalProgress(Console(stderr=True)) as progress:
        try:
            found = run_comparison(config, searches, num_seeds=seeds, limits=limits, out=out, progress=progress)
        except KeyboardInterrupt:
            click.echo("sdtune: stopped; the same command again goes on", err=True)
            raise
    write_report(found, out)
    results = Console(width=max(Console().width, 130))
    results.print(searches_table(found))
    results.print(f"report   {out}: searches.csv, searches.json, searches.png", soft_wrap=True, highlight=False)


def _use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _quieten_optuna() -> None:
    """Optuna reports every study it makes on stderr; here the progress bar does. The process is the command's own."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)


def _print_plan(console: Console, task: Any) -> None:
    config = task.config
    console.print(
        f"model    {config.model}: {task.target.num_layers} layers, {task.target.dtype}, on {task.target.device}"
    )
    console.print(
        f"prompts  {config.dataset}: {len(task.prompts.tuning)} for tuning ({config.samples_per_trial * config.batch_size} a "
        f"trial), {len(task.prompts.held_out)} held out, {config.max_new_tokens} tokens each"
        + (f", in batches of {config.batch_size}" if config.batch_size > 1 else "")
    )
    if task.heads or task.missing_heads:
        then = "would be distilled first" if config.distill == "auto" else "are searched without"
        missing = f"; {len(task.missing_heads)} missing ones {then}" if task.missing_heads else ""
        console.print(f"heads    {config.heads}: {len(task.heads)} found{missing}")
    for name in config.study:
        console.print(f"study    {name}: {config.study_settings(name)}", soft_wrap=True)
    console.print(f"storage  {config.storage}, experiment {config.resolved_experiment()!r}")
    console.print(f"tracking {config.tracking_uri}")
    console.print(f"profile  {config.out}")
    console.print("dry run: nothing was written")


def _print_interrupted(interrupted: Any) -> None:
    if interrupted.best is None:
        click.echo("sdtune: stopped before a trial was finished", err=True)
        return
    best = interrupted.best
    click.echo(
        f"sdtune: stopped; best so far {best.speedup:.2f}x on tuning prompts: {best.candidate.draft.describe()}",
        err=True,
    )
    if interrupted.out is not None:
        click.echo(f"sdtune: written unconfirmed to {interrupted.out}; the same command again goes on", err=True)


def _print_conclusion(console: Console, found: Any, out: Path, open_mlflow: str) -> None:
    for name, reason in found.studies.items():
        console.print(f"search   {name}: {reason}", highlight=False)
    cost = found.cost
    heads = f"; the exit heads took {cost.distillation_seconds:.0f} s to distil" if cost.distillation_seconds else ""
    console.print(f"cost     {cost.num_trials} trials, {cost.search_seconds:.0f} s of search{heads}", highlight=False)
    interval = found.confirmed.speedup_interval()
    shown = f"{interval.value:.2f}x, 95 % interval {interval.ci95[0]:.2f} to {interval.ci95[1]:.2f}"
    if found.profile.measured is None:
        console.print("[bold]Nothing beats plain decoding here with 95 % confidence[/bold]; the profile says so.")
        if found.winner.candidate.draft.kind != "none":
            console.print(f"nearest  {found.winner.study}: {shown}", highlight=False)
    else:
        console.print(f"winner   {found.winner.study}: [bold]{shown}[/bold] on held-out prompts", highlight=False)
    console.print(f"profile  {out}   (sdtune show {out})", soft_wrap=True, highlight=False)
    console.print(f"review   {open_mlflow}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
