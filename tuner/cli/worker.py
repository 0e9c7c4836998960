"""`sdtune worker`: a process that runs the searches of a queue."""

from __future__ import annotations

import signal
from pathlib import Path

import click

from tuner.cli.service import DATABASE, FOLDER
from tuner.cli.terminal import use_threads
from tuner.profile_address import DEFAULT_STORE


@click.command()
@DATABASE
@FOLDER
@click.option("--device", default="auto", show_default=True, help="Device that the searches run on, such as cuda:0.")
@click.option("--queue", default="default", show_default=True, help="Queue to serve: one for each kind of device.")
@click.option("--name", help="Name of the worker; default: made of the machine and the process.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads of torch.")
@click.option(
    "--tracking-uri", envvar="MLFLOW_TRACKING_URI", default=DEFAULT_STORE, show_default=True, help="MLflow store."
)
def worker(
    database: str, folder: Path, device: str, queue: str, name: str | None, threads: int | None, tracking_uri: str
) -> None:
    """Run the searches of a queue, one at a time.

    Run one worker for each device. If one dies, another takes over its search: finished trials and steps are not repeated. Workers
    on several machines need PostgreSQL as --database and one --folder. Ctrl-C or SIGTERM ends the worker, and its search is taken
    over, or continued when the next worker starts.

    \b
    Examples:
      sdtune worker --threads 8
      sdtune worker --device cuda:0 --queue NVIDIA-H100 --database postgresql+psycopg://sdtune@db/sdtune --folder /shared/searches
    """
    from tuner.service.installed import check_installed

    check_installed()

    from tuner.service.worker import SearchWorker, WorkerSettings

    use_threads(threads)
    made = SearchWorker(WorkerSettings(database, tracking_uri, folder, device, queue, name))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: made.stop())
    click.echo(f"sdtune: worker {made.name} serves the queue {queue!r}", err=True)
    made.run()
