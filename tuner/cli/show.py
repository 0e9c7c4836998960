"""`sdtune show`: a profile, or the trained heads in a folder, on one screen."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from tuner.fields import local_profile


@click.command()
@click.argument("path", metavar="PROFILE|DIR", type=click.Path(path_type=Path))
def show(path: Path) -> None:
    """Show a profile on one screen: draft, draft-length rule and measured speed-up. Or the trained heads in a folder."""
    path = local_profile(path)
    for each in _heads(path) if path.is_dir() else [_profile(path)]:
        Console().print(each)


def _heads(folder: Path) -> list[object]:
    from decoding.head_folder import list_feature_head, list_heads
    from tuner.heads.report import exits_table, feature_head_table

    feature = list_feature_head(folder)
    exits = list_heads(folder, required=feature is None)
    return [*([exits_table(exits)] if exits else []), *([feature_head_table(feature)] if feature else [])]


def _profile(path: Path) -> object:
    from decoding.profile import DraftProfile

    profile = DraftProfile.load(path)

    from tuner.search.report import profile_panel

    return profile_panel(profile)
