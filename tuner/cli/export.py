"""`sdtune export`, a profile for another engine, and `sdtune promote`, a profile for production in the model registry."""

from __future__ import annotations

from getpass import getuser
from typing import Any

import click
from rich.console import Console

from tuner.cli.options import GroupedCommand, keys_of, options_of, settings_from
from tuner.cli.terminal import QUIET, check_names, print_facts, progress_on_stderr, use_threads
from tuner.errors import without_password
from tuner.export.settings import ExportSettings
from tuner.fields import DEFAULT_STORE

FLAGS = (
    "to",
    "out",
    "draft_tokens",
    "schedule",
    "drop",
    "model",
    "device",
    "threads",
    "copy_weights",
    "overwrite",
)
"""Settings that are flags; the others are for `--set`."""


@click.command(cls=GroupedCommand)
@keys_of(ExportSettings)
@options_of(ExportSettings, only=FLAGS, positions=("profile",))
@QUIET
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
    The speed-up of the profile does not transfer: measure it in the engine. `sdtune bench --engine` does.

    \b
    Examples:
      sdtune export profile.yaml --to folder --out llama-tuned
      sdtune export profile.yaml --to vllm --out llama-vllm
      sdtune export profile.yaml --to llama.cpp --out llama-cpp
      sdtune export profile.yaml --to vllm --out llama-vllm --schedule tune/tune.json
      sdtune export profile.yaml --to hf --out llama-hf --drop bits
    """
    settings = settings_from(ExportSettings, flags)
    check_names(profile=settings.profile, model=settings.model)

    from decoding.profile import DraftProfile
    from tuner.export.engines.vllm import native_command
    from tuner.export.run import export as write_export

    use_threads(settings.threads)
    with progress_on_stderr() as progress:
        exported = write_export(settings, progress)
    native = native_command(DraftProfile.load(settings.profile), settings.profile) if settings.to == "vllm" else None
    print_facts(
        Console(),
        export=exported.out,
        files=", ".join(exported.files),
        next=f"read {exported.out}/README.md",
        natively=native and f"with the plugin, the whole profile: {native}",
    )


@click.command()
@click.argument("source", metavar="RUN|PROFILE")
@click.option("--name", required=True, help="Name in the registry.")
@click.option("--why", required=True, help="Reason, kept with the version.")
@click.option("--by", help="Who decides; default: the user of this machine.")
@click.option("--alias", default="champion", show_default=True, help="Alias that production reads.")
@click.option(
    "--force",
    is_flag=True,
    help="Promote also without a confirmed speed-up, or of a busy machine, or over a faster one.",
)
@click.option(
    "--tracking-uri", envvar="MLFLOW_TRACKING_URI", default=DEFAULT_STORE, show_default=True, help="MLflow store."
)
def promote(source: str, name: str, why: str, by: str | None, alias: str, force: bool, tracking_uri: str) -> None:
    """Register a profile with its heads in MLflow, and make it the champion that production loads.

    SOURCE is the id of a search's run in MLflow, or a profile. It is refused unless the interval of its speed-up lies above 1, if
    the machine was busy when it was measured, and if its speed-up is below the champion's. Nothing is measured: both figures are
    those of their searches.

    \b
    Examples:
      sdtune promote profile.yaml --name llama-code --why 'faster on requests of May'
      sdtune generate models:/llama-code@champion --prompt 'def main():'
    """
    from tuner.registry import lead
    from tuner.registry import promote as promote_profile

    found = promote_profile(
        source, name, why=why, by=by or getuser(), tracking_uri=tracking_uri, alias=alias, force=force
    )
    replaced = "nothing" if found.replaced is None else f"version {found.replaced}"
    print_facts(
        Console(),
        promoted=f"{found.address}, version {found.version}, in place of {replaced}",
        speedup=None if found.speedup is None else f"{found.speedup}",
        champion=None if found.champion is None else f"{found.champion}, version {found.replaced}",
        difference=None
        if found.champion is None or found.speedup is None
        else f"{lead(found.speedup, found.champion)} the champion's, by two searches",
        load=f'load_decoder("{found.address}", tracking_uri="{without_password(tracking_uri)}")',
    )
