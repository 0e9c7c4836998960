"""`sdtune tune`: the lookup or the draft model that an engine runs, set for a model, its texts and a load."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from tuner.cli.options import GroupedCommand, keys_of, options_of, settings_from
from tuner.cli.terminal import JSON, QUIET, check_names, is_asked, print_facts, progress_on_stderr, use_threads
from tuner.errors import EngineError
from tuner.tune.config import TuneConfig

FLAGS = (
    "model",
    "dataset",
    "profile",
    "prompt_column",
    "template",
    "tuning_prompts",
    "held_out_prompts",
    "max_new_tokens",
    "engine",
    "engine_home",
    "engine_args",
    "draft_model",
    "sequences",
    "dtype",
    "threads",
    "out",
)
"""Settings that are flags; the others are for `--set`."""


@click.command(cls=GroupedCommand)
@keys_of(TuneConfig)
@options_of(TuneConfig, only=FLAGS, positions=("model", "dataset"))
@QUIET
@JSON
def tune(**flags: Any) -> None:
    """Find the best settings of an engine's speculation, and print them as its flags.

    Tuned are vLLM's n-grams (longest, shortest, tokens), its suffixes where arctic-inference is installed, llama.cpp's simple
    n-grams, and the number of tokens of your own --draft-model. No profile is needed then, and the model is not loaded here. With
    --profile it is the number of tokens of that draft. With --sequences, each number of requests side by side gets its own number
    of tokens, or none where plain decoding is faster.

    A few servers are enough: what a lookup does on a text is known without decoding it, and costs are fitted to what was measured.
    The chosen settings are then measured on other prompts, in turns with plain decoding, every text compared. The same command goes
    on after a kill.

    \b
    Examples:
      sdtune tune --model MODEL --dataset humaneval --engine vllm --engine-home vllm-env
      sdtune tune --model MODEL --dataset prompts.jsonl --engine vllm --sequences 1 --sequences 8 --sequences 32
      sdtune tune --model MODEL --dataset prompts.jsonl --engine llama.cpp --draft-model small.gguf --threads 4
      sdtune tune --profile profile.yaml --dataset prompts.jsonl --engine vllm --sequences 1 --sequences 4 --sequences 8
    """
    config = settings_from(TuneConfig, flags)
    check_names(profile=config.profile, model=config.model, revision=config.revision, dataset=config.dataset)

    from tuner.tune.run import run_and_write

    use_threads(config.threads)
    with progress_on_stderr() as progress:
        shown, written, wrong = run_and_write(config, progress=progress)
    if is_asked("json"):
        click.echo(written.read_text(encoding="utf-8"))
    else:
        Console().print(shown, highlight=False)
        print_facts(Console(), results=config.out)
    if wrong is not None:
        raise EngineError(wrong)
