"""`sdtune doctor`: what a model can do, found by running it."""

from __future__ import annotations

import sys
from typing import Any

import click
from rich.console import Console

from decoding.documents.strict_yaml import Document
from tuner.cli.options import GroupedCommand, options_of, settings_from
from tuner.fields import Device, Dtype, Model, Revision


class DoctorSettings(Document):
    """Settings of `sdtune doctor`."""

    model: Model
    revision: Revision = None
    dtype: Dtype = "auto"
    device: Device = "auto"


@click.command(cls=GroupedCommand)
@options_of(DoctorSettings)
def doctor(**flags: Any) -> None:
    """Probe a model: which sublayers can be skipped, and can its cache be rolled back? Exit status 1 if it cannot be tuned."""
    settings = settings_from(DoctorSettings, flags)

    from decoding.probe import probe
    from tuner.inputs.models import load
    from tuner.search.report import capabilities_panel

    loaded = load(settings.model, revision=settings.revision, dtype=settings.dtype, device=settings.device)
    found = probe(loaded.model)
    Console().print(capabilities_panel(found))
    if not found.is_supported:
        sys.exit(1)
