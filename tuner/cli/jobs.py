"""`sdtune jobs`: a client of the tuning service."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from tuner.cli.options import GroupedCommand, given, keys_of
from tuner.cli.service import TOKEN
from tuner.cli.terminal import JSON, is_asked, print_facts, print_json, visible
from tuner.config import SearchConfig

if TYPE_CHECKING:
    from decoding.profile import DraftProfile
    from tuner.service.client import ServiceClient
    from tuner.service.contract import JobResult, SearchJob


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
    """
    context.obj = address


def _client(context: click.Context) -> ServiceClient:
    from tuner.service.client import ServiceClient

    return ServiceClient(context.obj, os.environ.get(TOKEN))


OUT = click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("profile.yaml"),
    show_default=True,
    help="File of the profile.",
)


@jobs.command(cls=GroupedCommand)
@click.argument("config", metavar="CONFIG", type=click.Path(path_type=Path))
@keys_of(SearchConfig)
@click.option("--queue", default="default", show_default=True, help="Queue of the workers that may run it.")
@click.option("--wait", is_flag=True, help="Watch the search, and fetch its profile.")
@OUT
@JSON
@click.pass_context
def submit(context: click.Context, config: Path, queue: str, wait: bool, out: Path, **keys: Any) -> None:
    """Queue the search of a configuration; one that was submitted before is found again."""
    from decoding.documents.strict_yaml import merged, read_mapping, validate
    from tuner.errors import ConfigError
    from tuner.service.admission import OF_THE_SERVICE
    from tuner.service.contract import SearchRequest

    if wait:
        _check_out(out)
    settings = merged(read_mapping(config, what="configuration", error=ConfigError), given(SearchConfig, keys))
    if left_out := [key for key in OF_THE_SERVICE if key in settings]:
        click.echo(f"sdtune: left to the service: {', '.join(left_out)}", err=True)
    kept = {key: value for key, value in settings.items() if key not in OF_THE_SERVICE}
    body = {"config": kept, "queue": queue}
    request = validate(SearchRequest, body, source="command line", error=ConfigError)
    with _client(context) as client:
        found = client.submit(request)
        _print(found)
        if wait:
            _watch(client, found.id)
            _fetch(client, found.id, out)


@jobs.command(name="list")
@JSON
@click.pass_context
def list_all(context: click.Context) -> None:
    """List the latest searches."""
    with _client(context) as client:
        found = client.searches()
        if is_asked("json"):
            print_json([job.model_dump(mode="json") for job in found])
        else:
            click.echo("".join(f"{_line(job)}\n" for job in found), nl=False)


@jobs.command()
@click.argument("job", metavar="ID")
@JSON
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
    """Write the profile of a finished search, and its heads beside it.

    Nothing is replaced but a profile that this command wrote.
    """
    with _client(context) as client:
        _fetch(client, job, out)


@jobs.command()
@click.argument("job", metavar="ID")
@JSON
@click.pass_context
def cancel(context: click.Context, job: str) -> None:
    """Stop a search; a running one after its trial."""
    with _client(context) as client:
        _print(client.cancel(job))


@jobs.command()
@click.argument("job", metavar="ID")
@JSON
@click.pass_context
def resume(context: click.Context, job: str) -> None:
    """Queue a cancelled or failed search again; nothing that is finished is repeated."""
    with _client(context) as client:
        _print(client.resume(job))


@jobs.command()
@JSON
@click.pass_context
def workers(context: click.Context) -> None:
    """List the workers."""
    with _client(context) as client:
        found = client.workers()
        if is_asked("json"):
            print_json([each.model_dump(mode="json") for each in found])
            return
        for each in found:
            state = "dead" if not each.alive else f"runs {each.job}" if each.job else "waits"
            facts = f"{each.name}  {each.device}  queue {each.queue}  {state}, heard of {each.silent_seconds:.0f} s ago"
            click.echo(visible(facts))


def _watch(client: ServiceClient, job: str) -> None:
    """Show a search until it is over. Raises `ServiceError` if it has no result."""
    from tuner.service.contract import JobState, ServiceError

    shown = ""
    for now in client.watch(job):
        if (line := _line(now)) != shown:
            _print(now)
        shown = line
    if now.state is not JobState.FINISHED:
        raise ServiceError(f"the search {job} is {now.state}{f': {now.error}' if now.error else ''}")


FETCHED = b"# written by sdtune jobs, which may replace this file\n"


def _fetch(client: ServiceClient, job: str, out: Path) -> None:
    """Write a profile and the heads that it names, all that is checked before anything is written; then print the report."""
    from decoding.documents.atomic_write import write_atomically
    from decoding.documents.strict_yaml import dump
    from tuner.errors import ConfigError

    _check_out(out)
    result = client.result(job)
    profile = _checked(result.profile, job)
    whole = {out.parent / name: _head(client, job, result, name, sha) for name, sha in profile.draft.files.items()}
    if out in whole:
        raise ConfigError(f"{out} is also the name of a head of the profile: name another --out")
    for path, content in whole.items():
        if (path.exists() or path.is_symlink()) and not (path.is_file() and path.read_bytes() == content):
            raise ConfigError(
                f"{path} is there already with other contents: name an --out in another folder, or remove it"
            )
    whole[out] = FETCHED + dump(profile).encode()  # the last to be written
    for path, content in whole.items():
        write_atomically(path, content, what="the profile", error=ConfigError)
    click.echo(visible(result.report, lines=True))
    print_facts(Console(), profile=out)


def _check_out(out: Path) -> None:
    """Raise `ProfileError` or `ConfigError` unless a profile can be written to `out` without replacing another's."""
    from tuner.errors import ConfigError
    from tuner.output_paths import check_writable

    check_writable(out)
    if out.exists() and (found := out.read_bytes()) and not found.startswith(FETCHED):
        raise ConfigError(f"{out} is there already, and no `sdtune jobs` wrote it: name another --out, or remove it")


def _checked(text: str, job: str) -> DraftProfile:
    """Return the profile in an answer of the service. Raises `ProfileError`."""
    from decoding.profile import DraftProfile

    with TemporaryDirectory() as folder:
        received = Path(folder) / f"{job}.yaml"
        received.write_text(text, encoding="utf-8")
        return DraftProfile.load(received)


def _head(client: ServiceClient, job: str, result: JobResult, name: str, sha256: str) -> bytes:
    from tuner.service.contract import ServiceError

    if name not in result.files:
        raise ServiceError(f"the service has no {name}, which the profile of {job} names")
    content = client.file(job, result.files.index(name))
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ServiceError(f"the service sent another {name} than the profile of {job} names: its contents differ")
    return content


def _print(job: SearchJob) -> None:
    """Print a job, as a line of JSON if asked for."""
    click.echo(job.model_dump_json(ensure_ascii=True) if is_asked("json") else _line(job))


def _line(job: SearchJob) -> str:
    progress = job.progress
    facts: list[Any] = [job.id, job.state, job.model, job.dataset]
    if not job.state.is_over:
        facts += [progress.stage, f"{progress.trials} trials"]
    if job.state == "running" and progress.best_speedup is not None:
        facts.append(f"best on tuning prompts {progress.best_speedup:.2f}x")
    facts.append(job.verdict)
    if job.error:
        facts.append(job.error)
    if not (job.state.is_over or progress.stage):
        facts += progress.lines[-1:]  # the store that it waits for
    return visible("  ".join(str(each) for each in facts if each))
