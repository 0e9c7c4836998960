"""Command lines from settings, and types of the fixtures that run commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click
from click.testing import Result

from tuner.cli.main import main
from tuner.config import DistillSettings

# `sdtune search` with settings as keyword arguments; None removes one.
SearchCommand = Callable[..., Result]


def command_line(command: str, settings: Mapping[str, Any]) -> list[str]:
    """Return a command with settings as flags, or by `--set` if they have none; True is a switch, None is left out."""
    found = main.get_command(click.Context(main), command)
    assert found is not None
    flags = {flag for parameter in found.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    arguments = [command]
    for name, value in settings.items():
        flag, key = f"--{name.replace('_', '-')}", name.replace("-", "_")
        if value is True:
            arguments.append(flag)
        elif flag in flags and value is not None:
            arguments += [flag, str(value)]
        elif value is not None:
            inside = command == "distill" and key in DistillSettings.model_fields
            arguments += ["--set", f"{'distillation.' * inside}{key}={value}"]
    return arguments
