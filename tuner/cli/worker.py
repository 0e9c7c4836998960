"""`sdtune worker`: a process that runs the searches of a queue."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import click

from decoding.documents.strict_yaml import validate
from tuner.cli.options import GroupedCommand, given, options_of
from tuner.cli.service import DATABASE, FOLDER
from tuner.cli.terminal import use_threads
from tuner.config import SearchConfig
from tuner.errors import ConfigError
from tuner.fields import DEFAULT_STORE

OF_THE_WORKER = (
    "deploy_to",
    "engine_home",
    "engine_args",
)


@click.command(cls=GroupedCommand)
@DATABASE
@FOLDER
@click.option("--device", default="auto", show_default=True, help="Device that the searches run on, such as cuda:0.")
@click.option("--queue", default="default", show_default=True, help="Queue to serve: one for each kind of device.")
@click.option("--name", help="Name of the worker; default: made of the machine and the process.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads of torch.")
@click.option(
    "--tracking-uri", envvar="MLFLOW_TRACKING_URI", default=DEFAULT_STORE, show_default=True, help="MLflow store."
)
@options_of(SearchConfig, only=OF_THE_WORKER)
def worker(
    database: str,
    folder: Path,
    device: str,
    queue: str,
    name: str | None,
    threads: int | None,
    tracking_uri: str,
    **flags: Any,
) -> None:
    """Run the searches of a queue, one at a time.

    With --deploy-to, the searches of the queue are for that engine, which runs here. Requests do not choose it.

    Run one worker for each device. If one dies, another takes over its search: finished trials are not repeated. Workers
    on several machines need PostgreSQL as --database and one --folder. Ctrl-C or SIGTERM ends the worker, and its search is taken
    over, or continued when the next worker starts.

    \b
    Examples:
      sdtune worker --threads 8
      sdtune worker --device cuda:0 --queue NVIDIA-H100 --database postgresql+psycopg://sdtune@db/sdtune --folder /shared/searches
    """

    from tuner.service.worker import SearchWorker, WorkerSettings

    use_threads(threads)
    engine = _checked(given(SearchConfig, flags), device)
    made = SearchWorker(WorkerSettings(database, tracking_uri, folder, device, queue, name, engine))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: made.stop())
    click.echo(f"sdtune: worker {made.name} serves the queue {queue!r}", err=True)
    made.run()


def _checked(engine: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the settings of the engine. Raises `ConfigError` if they contradict each other."""
    any_search = {"model": "-", "dataset": "-", "device": device}
    validate(SearchConfig, {**any_search, **engine}, source="command line", error=ConfigError)
    return engine
