"""`sdtune service`, the HTTP interface of tuning as a service, and `sdtune worker`, which runs the searches of a queue."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import click

from decoding.documents.strict_yaml import validate
from tuner.cli.options import GroupedCommand, given, options_of
from tuner.cli.terminal import use_threads
from tuner.config import SearchConfig
from tuner.errors import ConfigError
from tuner.fields import DEFAULT_STORE

TOKEN = "SDTUNE_SERVICE_TOKEN"
DRAIN_SECONDS = 5
"""Time that requests have to end when the service is stopped; a client that watches a search does so until the search is over."""
DATABASE = click.option(
    "--database",
    envvar="SDTUNE_DATABASE",
    show_envvar=True,
    default="sqlite:///sdtune-service.db",
    show_default=True,
    metavar="URL",
    help="Database of jobs and trials, which the service and its workers share.",
)
FOLDER = click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("searches"),
    show_default=True,
    help="Folder of profiles and heads, which the service and its workers share.",
)


@click.command()
@click.option("--allow-model", "models", multiple=True, required=True, metavar="NAME|DIR", help="Allowed; repeatable.")
@click.option("--allow-dataset", "datasets", multiple=True, required=True, metavar="NAME|DIR", help="Likewise.")
@DATABASE
@FOLDER
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=8400, show_default=True, help="Port to listen on.")
@click.option("--mlflow-address", metavar="URL", help="Web address of MLflow, for links.")
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="KEY=VALUE",
    help="Largest value in a request, such as timeout=4h, distillation.steps=2000, or jobs=5 unfinished ones; repeatable.",
)
def service(
    models: tuple[str, ...],
    datasets: tuple[str, ...],
    database: str,
    folder: Path,
    host: str,
    port: int,
    mlflow_address: str | None,
    limits: tuple[str, ...],
) -> None:
    """Accept searches over HTTP and keep them in a queue, which `sdtune worker` serves.

    The service loads no model. Models and data sets must be on its lists: a name, or a folder in which all are allowed. A request
    names no other files, and code of a model's repository is never run.

    Only this machine can connect, unless --host says otherwise. Then clients must send the token in the environment variable
    SDTUNE_SERVICE_TOKEN as a bearer token; without that variable the service does not start. Put a proxy with TLS before it.

    \b
    Examples:
      sdtune service --allow-model configs/demo/model --allow-dataset configs/demo
      sdtune worker
      sdtune jobs submit configs/demo.yaml --wait
    """
    from decoding.serving.connections import run_server
    from decoding.serving.hosts import host_names, is_loopback
    from decoding.serving.run import refuse_busy_address
    from tuner.service.admission import Allowed, limits_of
    from tuner.service.app import ServiceSettings, create_service
    from tuner.service.jobs import Jobs

    token = os.environ.get(TOKEN)
    if not token and not is_loopback(host):
        raise ConfigError(f"--host {host}: other machines could connect: set {TOKEN} to a secret that clients send")
    hosts = host_names(host)
    refuse_busy_address(host, port)
    # Checking a configuration imports the studies and torch: now, so that the first client does not wait for that.
    SearchConfig.model_validate({"model": "none", "dataset": "none", "studies": {"joint": {}}})
    allowed = Allowed(models, datasets, limits_of(limits))
    jobs = Jobs(database, is_patient=False)
    settings = ServiceSettings(allowed, folder, token, mlflow_address, hosts)
    click.echo(f"sdtune: listening on http://{host}:{port}", err=True)
    try:
        run_server(
            create_service(jobs, settings), host=host, port=port, log_level="warning", drain_seconds=DRAIN_SECONDS
        )
    finally:
        jobs.close()


OF_THE_WORKER = ("deploy_to", "engine_home", "engine_args")


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
    from tuner.databases import check_address
    from tuner.errors import StorageError
    from tuner.inputs.models import resolve_device
    from tuner.service.contract import SearchRequest
    from tuner.service.worker import SearchWorker, WorkerSettings

    use_threads(threads)
    engine = given(SearchConfig, flags)
    any_search = {"model": "-", "dataset": "-", "device": device}
    validate(SearchConfig, {**any_search, **engine}, source="command line", error=ConfigError)
    validate(SearchRequest, {"config": {}, "queue": queue}, source="command line", error=ConfigError)
    resolve_device(device)
    check_address(database, what="--database", error=StorageError)
    made = SearchWorker(WorkerSettings(database, tracking_uri, folder, device, queue, name, engine))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: made.stop())
    click.echo(f"sdtune: worker {made.name} serves the queue {queue!r}", err=True)
    made.run()
