"""`sdtune evaluate service`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tuner.evaluation.contract import EVALUATION, Evaluation, Report, ResultsFile
from tuner.fields import Seed

if TYPE_CHECKING:
    from tuner.progress import Progress


class ServiceEvaluation(Evaluation):
    """Kill the parts of the tuning service while it works, and load its storage.

    Jobs with planted costs are submitted over HTTP. At random moments a worker, the service, the MLflow server or, with PostgreSQL,
    one of their connections is killed (SIGKILL) and started again. No finished trial may be lost or doubled, no finished step
    repeated, no run in MLflow left open, and each job must end with the winner of an undisturbed one.

    Load: several processes share one study of short trials. The table shows trials per second by the number of processes. Needs the
    extra `service`, and for PostgreSQL the extra `postgres` and the server's programs. Exit status 1 if anything was lost. A number
    of 0 leaves a part out.

    Watchers: thousands of clients ask for the events of one job at the same time. Each must be served, or be told that the service
    is busy, and the service must answer as soon as they have gone. On SQLite only.

    \b
    Examples:
      sdtune evaluate service --out service.json
      sdtune evaluate service --kills 10 --load-trials 0 --databases sqlite
    """

    databases: tuple[Literal["sqlite", "postgresql"], ...] = Field(
        ("sqlite", "postgresql"), description="Databases to use; repeatable.", json_schema_extra=EVALUATION
    )
    kills: int = Field(50, ge=0, description="Kills, on each database.", json_schema_extra=EVALUATION)
    load_trials: int = Field(
        1000, ge=0, description="Trials of each load, on each database.", json_schema_extra=EVALUATION
    )
    sqlite_workers: int = Field(8, ge=1, description="Most processes on SQLite.", json_schema_extra=EVALUATION)
    postgresql_workers: int = Field(16, ge=1, description="Most processes on PostgreSQL.", json_schema_extra=EVALUATION)
    watchers: int = Field(
        10_000, ge=0, description="Clients that watch one job at the same time.", json_schema_extra=EVALUATION
    )
    seed: Seed = 0
    out: ResultsFile = None

    def run(self, progress: Progress) -> Report:
        """Run the parts, write the JSON file if one is named, and return the tables."""
        from tuner.evaluation.service.run import run_and_write

        return run_and_write(self, progress)
