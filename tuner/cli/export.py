"""`sdtune export`: a profile for another engine."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from tuner.cli.options import GroupedCommand, keys_of, options_of, settings_from
from tuner.cli.terminal import check_names, print_facts, progress_on_stderr, use_threads
from tuner.export.settings import ExportSettings

FLAGS = (
    "to",
    "out",
    "draft_tokens",
    "schedule",
    "drop",
    "model",
    "device",
    "threads",
    "prompts",
    "prompt_column",
    "group_column",
    "copy_weights",
    "overwrite",
)
"""Settings that are flags; the others are for `--set`."""


@click.command(cls=GroupedCommand)
@keys_of(ExportSettings)
@options_of(ExportSettings, only=FLAGS, position="profile")
def export(**flags: Any) -> None:
    """Write a profile for another engine: its draft as a model folder, settings, and what is lost.

    A draft of whole blocks is an ordinary checkpoint of the model's family: N blocks, or N blocks and the trained exit head as
    block N + 1. It is written with the settings of the engine and reloaded; unless its logits equal the draft's, bit for bit,
    nothing is written.

    \b
      folder     the whole profile as a model folder, for generate(custom_generate=DIR) and transformers serve
      hf         transformers' generate(assistant_model=...), or its prompt lookup
      vllm       a draft model or ngram, as --speculative-config
      sglang     STANDALONE or NGRAM, as flags
      trtllm     Draft_Target or NGram, as YAML
      llama.cpp  lookup, draft, threshold and quantised draft, as flags and preset.ini
      mlx        a draft model, as flags

    A folder decodes with sdtune and loses nothing: streaming, stop strings and sampling work. Its weights are links, unless
    --copy-weights.

    LOSSES.md says what survives, what is lost (most engines draft a fixed number of tokens) and which memory the draft adds.
    The speed-up of the profile does not transfer: measure it in the engine. prompts.jsonl holds the held-out prompts for
    `vllm bench serve --dataset-name custom` and GuideLLM, if the dataset is found; give the columns of the search.

    \b
    Examples:
      sdtune export profile.yaml --to folder --out llama-tuned
      sdtune export profile.yaml --to vllm --out llama-vllm
      sdtune export profile.yaml --to llama.cpp --out llama-cpp --prompts prompts.jsonl --group-column file
      sdtune export profile.yaml --to vllm --out llama-vllm --schedule bench/schedule.json
      sdtune export profile.yaml --to hf --out llama-hf --drop bits
    """
    settings = settings_from(ExportSettings, flags)
    check_names(profile=settings.profile, model=settings.model)

    from tuner.export.run import export as write_export

    use_threads(settings.threads)
    with progress_on_stderr() as progress:
        exported = write_export(settings, progress)
    print_facts(Console(), export=exported.out, files=", ".join(exported.files))
