"""The command `sdtune`: a group whose subcommands are imported when they are asked for, and one way to report errors.

An error of the user (`SdtuneError`, wrong usage) becomes one line on stderr and exit status 2; Ctrl-C ends with status 130, and
SIGTERM with status 143. Commands never exit themselves, so a `SystemExit` comes from other code: it is named, with status 1.
"""

from __future__ import annotations

import pkgutil
import signal
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import click

from decoding.errors import SdtuneError, first_line
from tuner.errors import without_password


class Termination:
    """Context in which SIGTERM raises KeyboardInterrupt in the main thread. `was_asked` tells it from Ctrl-C afterwards."""

    def __init__(self) -> None:
        self.was_asked = False
        self._before: Any = None
        self._is_set = False

    def __enter__(self) -> Termination:
        # Only the main thread may set handlers, and one that the program was started with to ignore is kept.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before, self._is_set = signal.signal(signal.SIGTERM, self._raise), True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_set:
            signal.signal(signal.SIGTERM, self._before)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.was_asked = True
        raise KeyboardInterrupt


EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


@dataclass(frozen=True)
class CommandEntry:
    """One subcommand: where it is listed, what it does in a line, and the `module:name` it is imported from."""

    section: str
    summary: str
    reference: str


COMMANDS: Mapping[str, CommandEntry] = {
    "search": CommandEntry("Tune", "Find the fastest lossless draft and write a profile.", "tuner.cli.search:search"),
    "distill": CommandEntry(
        "Tune", "Train exit heads, which make early exits draft better.", "tuner.cli.distill:distill"
    ),
    "tune": CommandEntry("Tune", "Set the lookup or draft model that an engine runs.", "tuner.cli.tune:tune"),
    "show": CommandEntry("Use", "Show a profile, or the exit heads in a folder.", "tuner.cli.show:show"),
    "generate": CommandEntry("Use", "Continue a prompt with a profile.", "tuner.cli.generate:generate"),
    "serve": CommandEntry("Use", "Serve a profile by OpenAI's HTTP API.", "tuner.cli.serve:serve"),
    "report": CommandEntry("Use", "Write the HTML report of a search.", "tuner.cli.report:report"),
    "export": CommandEntry("Use", "Write a profile for another engine.", "tuner.cli.export:export"),
    "promote": CommandEntry(
        "Use", "Register a profile, and make it production's champion.", "tuner.cli.export:promote"
    ),
    "doctor": CommandEntry("Check", "Report whether a model can be tuned.", "tuner.cli.doctor:doctor"),
    "bench": CommandEntry("Check", "Compare a profile with other ways to decode.", "tuner.cli.bench:bench"),
    "service": CommandEntry("Service", "Accept searches over HTTP.", "tuner.cli.service:service"),
    "worker": CommandEntry("Service", "Run the searches of a service.", "tuner.cli.service:worker"),
    "jobs": CommandEntry("Service", "Submit searches to a service, and fetch profiles.", "tuner.cli.jobs:jobs"),
}
"""To add a command, write its file and name it here."""


class ProductGroup(click.Group):
    """Group that imports a subcommand on demand and turns errors of the user into one line and an exit status."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        return None if entry is None else pkgutil.resolve_name(entry.reference)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand:  # click looks for similar names among the imported ones
            raise click.NoSuchCommand(args[0], possibilities=COMMANDS, ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for section in dict.fromkeys(entry.section for entry in COMMANDS.values()):
            rows = [(name.ljust(width), entry.summary) for name, entry in COMMANDS.items() if entry.section == section]
            with formatter.section(section):
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        with Termination() as termination:
            return self._invoke(ctx, termination)

    def _invoke(self, ctx: click.Context, termination: Termination) -> Any:
        try:
            return super().invoke(ctx)
        except SdtuneError as error:
            _report(without_password(str(error)))
            ctx.exit(EXIT_BAD_INPUT)
        except click.UsageError as error:
            hint = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
            _report(f"{error.format_message()}{hint}")
            ctx.exit(EXIT_BAD_INPUT)
        except (KeyboardInterrupt, click.Abort):
            click.echo("sdtune: terminated" if termination.was_asked else "sdtune: interrupted", err=True)
            ctx.exit(EXIT_TERMINATED if termination.was_asked else EXIT_INTERRUPTED)
        except SystemExit as ended:
            *_, place = traceback.extract_tb(ended.__traceback__)
            why = first_line(ended, default="no message")
            _report(f"ended by SystemExit: {why}, raised at {place.filename}:{place.lineno}")
            ctx.exit(EXIT_FAILED)


def _report(error: str) -> None:
    """Print an error in one line. It may quote a file or a service."""
    from tuner.cli.terminal import visible

    click.echo(f"sdtune: {visible(' '.join(error.split()))}", err=True)


@click.group(cls=ProductGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="sdtune")
def main() -> None:
    """Find the fastest lossless self-speculative decoding of a model, prove it, and use it.

    \b
    Start:
      sdtune search --model MODEL --dataset DATASET
      sdtune generate profile.yaml --prompt TEXT --compare

    In production: load_decoder("profile.yaml").generate(model, **inputs), with load_decoder from
    decoding.deploy.
    """


if __name__ == "__main__":
    main()
