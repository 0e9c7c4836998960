"""`sdtune jobs`: a client of the tuning service."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from tuner.cli.service import TOKEN
from tuner.cli.terminal import print_facts

if TYPE_CHECKING:
    from tuner.drift.contract import DriftState
    from tuner.service.client import ServiceClient
    from tuner.service.contract import SearchJob
    from tuner.service.reporter import Reporter


@click.group()
@click.option(
    "--address",
    envvar="SDTUNE_SERVICE",
    default="http://127.0.0.1:8400",
    show_default=True,
    metavar="URL",
    help="Address of the service.",
)
@click.pass_context
def jobs(context: click.Context, address: str) -> None:
    """Submit searches to a tuning service, watch them and fetch their profiles.

    The token of the service, if it has one, is read from the environment variable SDTUNE_SERVICE_TOKEN.

    \b
    Examples:
      sdtune jobs submit configs/demo.yaml --wait --out profile.yaml
      sdtune jobs list
      sdtune jobs fetch 0123456789abcdef --out profile.yaml
      sdtune jobs observe 0123456789abcdef --server http://127.0.0.1:8000 --every 60
    """
    from tuner.service.installed import check_installed

    check_installed()
    context.obj = address


def _client(context: click.Context) -> ServiceClient:
    from tuner.service.client import ServiceClient

    return ServiceClient(context.obj, os.environ.get(TOKEN))


SERVER_KEY = "SDTUNE_API_KEY"
"""Environment variable of the key of `sdtune serve`."""
OUT = click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("profile.yaml"),
    show_default=True,
    help="File of the profile.",
)


@jobs.command()
@click.argument("config", metavar="CONFIG", type=click.Path(path_type=Path))
@click.option("--queue", default="default", show_default=True, help="Queue of the workers that may run it.")
@click.option("--heads", metavar="ID", help="Take the exit heads and the feature head of this finished search.")
@click.option("--wait", is_flag=True, help="Watch the search, and fetch its profile.")
@OUT
@click.pass_context
def submit(context: click.Context, config: Path, queue: str, heads: str | None, wait: bool, out: Path) -> None:
    """Queue the search of a configuration; one that was submitted before is found again."""
    from decoding.documents.strict_yaml import read_mapping, validate
    from tuner.errors import ConfigError
    from tuner.output_paths import check_writable
    from tuner.service.admission import OF_THE_SERVICE
    from tuner.service.contract import SearchRequest

    if wait:
        check_writable(out)
    settings = read_mapping(config, what="configuration", error=ConfigError)
    if left_out := [key for key in OF_THE_SERVICE if key in settings]:
        click.echo(f"sdtune: left to the service: {', '.join(left_out)}", err=True)
    kept = {key: value for key, value in settings.items() if key not in OF_THE_SERVICE}
    body = {"config": kept, "queue": queue, "heads": heads}
    request = validate(SearchRequest, body, source="command line", error=ConfigError)
    with _client(context) as client:
        found = client.submit(request)
        _print(found)
        if wait:
            _watch(client, found.id)
            _fetch(client, found.id, out)


@jobs.command(name="list")
@click.pass_context
def list_all(context: click.Context) -> None:
    """List the latest searches."""
    with _client(context) as client:
        for job in client.searches():
            _print(job)


@jobs.command()
@click.argument("job", metavar="ID")
@click.pass_context
def watch(context: click.Context, job: str) -> None:
    """Show a search at each change until it is over. The exit status is 0 if it has a result."""
    with _client(context) as client:
        _watch(client, job)


@jobs.command()
@click.argument("job", metavar="ID")
@OUT
@click.pass_context
def fetch(context: click.Context, job: str, out: Path) -> None:
    """Write the profile of a finished search, and its heads beside it."""
    with _client(context) as client:
        _fetch(client, job, out)


@jobs.command()
@click.argument("job", metavar="ID")
@click.pass_context
def cancel(context: click.Context, job: str) -> None:
    """Stop a search; a running one after its trial."""
    with _client(context) as client:
        _print(client.cancel(job))


@jobs.command()
@click.argument("job", metavar="ID")
@click.pass_context
def resume(context: click.Context, job: str) -> None:
    """Queue a cancelled or failed search again; nothing that is finished is repeated."""
    with _client(context) as client:
        _print(client.resume(job))


@jobs.command()
@click.pass_context
def workers(context: click.Context) -> None:
    """List the workers."""
    with _client(context) as client:
        for each in client.workers():
            state = "dead" if not each.alive else f"runs {each.job}" if each.job else "waits"
            click.echo(
                f"{each.name}  {each.device}  queue {each.queue}  {state}, heard of {each.silent_seconds:.0f} s ago"
            )


@jobs.command()
@click.argument("job", metavar="ID")
@click.option("--server", metavar="URL", help="Address of `sdtune serve`; its observations are reported first.")
@click.option("--every", type=click.IntRange(min=1), metavar="SECONDS", help="Report again and again, until Ctrl-C.")
@click.option("--texts", is_flag=True, help="Report texts as well: `serve --keep-texts`, `service --accept-texts`.")
@click.pass_context
def observe(context: click.Context, job: str, server: str | None, every: int | None, texts: bool) -> None:
    """Say whether the profile of a search still has its speed-up in production.

    With --server, the speeds and lengths that `sdtune serve` has seen lately are reported first. They hold numbers and no text, and
    nothing counts twice. A server keeps its latest 1000 windows, a few minutes of decoding: report at least that often. The key of
    the server, if it has one, is read from the environment variable SDTUNE_API_KEY.

    With --texts, the prompts and answers that a server with --keep-texts has kept are reported as well, as token ids. A service
    with --accept-texts keeps them in its database. They may be personal data.

    \b
    Examples:
      sdtune jobs observe 0123456789abcdef --server http://127.0.0.1:8000 --every 60
      sdtune jobs observe 0123456789abcdef
    """
    from tuner.errors import ConfigError

    if every is not None and server is None:
        raise ConfigError("--every: what should be reported again and again? give --server as well")
    if texts and server is None:
        raise ConfigError("--texts: whose texts should be reported? give --server as well")
    with _client(context) as client:
        if server is None:
            click.echo(_drift_line(client.observations(job)))
        else:
            from tuner.service.reporter import Reporter

            _report(Reporter(client, job, server, os.environ.get(SERVER_KEY), with_texts=texts), every)


@jobs.command()
@click.argument("job", metavar="ID")
@click.pass_context
def forget(context: click.Context, job: str) -> None:
    """Delete what production has reported for a search and those re-tuned from it, texts included."""
    with _client(context) as client:
        client.forget(job)
    click.echo(f"{job}: nothing is kept of what production has reported")


def _report(reporter: Reporter, every: int | None) -> None:
    """Report once, or `every` so many seconds; then a server or a service that does not answer is asked again."""
    from tuner.service.contract import ServiceError

    said = ""
    while True:
        try:
            line = _drift_line(reporter.report())
        except ServiceError as cause:
            if every is None:
                raise
            line = f"not reported: {cause}"
        if line != said:
            click.echo(line)
        said = line
        if every is None:
            return
        time.sleep(every)


def _drift_line(state: DriftState) -> str:
    facts = [state.verdict.value]
    if (now := state.posterior) is not None:
        facts.append(f"speed-up in production {now.speedup:.2f} [{now.low:.2f}, {now.high:.2f}]")
    if (known := state.promised) is not None:
        facts.append(f"promised {known.speedup:.2f} [{known.low:.2f}, {known.high:.2f}]")
    compared = f"{state.pairs} pairs in {state.blocks} blocks"
    facts.append(f"{compared} of {state.windows} windows and {state.plain_windows} plain ones")
    if state.texts:
        facts.append(f"{state.texts} texts kept")
    if state.retuning is not None:
        facts.append(f"re-tuning: {state.retuning}")
    return "  ".join(facts)


def _watch(client: ServiceClient, job: str) -> None:
    """Show a search until it is over. Raises `ServiceError` if it has no result."""
    from tuner.service.contract import JobState, ServiceError

    now, shown = None, ""
    for now in client.watch(job):
        if (line := _line(now)) != shown:
            click.echo(line)
        shown = line
    if now is None or not now.state.is_over:
        raise ServiceError(f"the service ended before the search {job}: watch it again")
    if now.state is not JobState.FINISHED:
        raise ServiceError(f"the search {job} is {now.state}{f': {now.error}' if now.error else ''}")


def _fetch(client: ServiceClient, job: str, out: Path) -> None:
    from decoding.documents.atomic_write import write_atomically
    from tuner.errors import ConfigError
    from tuner.output_paths import check_writable

    check_writable(out)
    result = client.result(job)
    files = [(out.parent / Path(name).name, client.file(job, number)) for number, name in enumerate(result.files)]
    whole: list[tuple[Path, bytes]] = [*files, (out, result.profile.encode())]
    for path, content in whole:
        write_atomically(path, content, what="the profile", error=ConfigError)
    click.echo(result.report)
    print_facts(Console(), profile=out)


def _print(job: SearchJob) -> None:
    click.echo(_line(job))


def _line(job: SearchJob) -> str:
    progress = job.progress
    facts: list[Any] = [job.id, job.state, job.model, job.dataset]
    if not job.state.is_over:
        facts += [progress.stage, f"{progress.trials} trials"]
    if progress.best_speedup is not None:
        facts.append(f"best {progress.best_speedup:.2f}x")
    if job.drift is not None:
        facts.append(f"in production: {job.drift}")
    if job.retuned_from is not None:
        facts.append(f"re-tuned from {job.retuned_from}")
    if job.error:
        facts.append(job.error)
    if job.state == "queued":
        facts.append(progress.message)  # the store that it waits for
    return "  ".join(str(each) for each in facts if each)
