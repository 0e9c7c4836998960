"""`sdtune promote`: a profile for production, in the model registry."""

from __future__ import annotations

from getpass import getuser

import click
from rich.console import Console

from tuner.cli.terminal import print_facts
from tuner.errors import without_password
from tuner.fields import DEFAULT_STORE


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
