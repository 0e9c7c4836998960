"""`sdtune show`: a profile, or the exit heads in a folder, on one screen."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console


@click.command()
@click.argument("path", metavar="PROFILE|DIR", type=click.Path(path_type=Path))
def show(path: Path) -> None:
    """Show a profile on one screen: draft, draft-length rule and measured speed-up. Or the exit heads in a folder."""
    Console().print(_heads(path) if path.is_dir() else _profile(path))


def _heads(folder: Path) -> object:
    from decoding.head_folder import list_heads
    from tuner.heads.report import exits_table

    return exits_table(list_heads(folder))


def _profile(path: Path) -> object:
    from decoding.profile import DraftProfile

    profile = DraftProfile.load(path)

    from tuner.search.report import profile_panel

    return profile_panel(profile)
