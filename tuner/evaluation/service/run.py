"""The evaluation, from settings to results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from decoding.documents.atomic_write import write_atomically
from tuner.errors import ConfigError
from tuner.evaluation.contract import Report
from tuner.evaluation.hardening.outcomes import CheckOutcome
from tuner.evaluation.service.crowd import Crowd, crowd
from tuner.evaluation.service.kills import KilledJobs, killed_jobs
from tuner.evaluation.service.load import Load, facts_of, loads
from tuner.evaluation.service.postgres import postgres
from tuner.evaluation.service.settings import ServiceEvaluation
from tuner.output_paths import check_writable
from tuner.progress import Progress
from tuner.results import stamped
from tuner.service.installed import check_installed
from tuner.tables import figures_table


def run_and_write(settings: ServiceEvaluation, progress: Progress) -> Report:
    """Run the parts on each database; the file is written after each part."""
    check_installed()
    if settings.out is not None:
        check_writable(settings.out, what="the results", name="service.json", error=ConfigError)
    document, shown, succeeded = dict[str, Any](), list[Any](), True
    for kind in settings.databases:
        found = document[kind] = dict[str, Any]()
        if settings.kills:
            with _database(kind) as (database, folder):

                def note(jobs: KilledJobs, found: dict[str, Any] = found) -> None:
                    found["kills"] = jobs.facts
                    _write(settings, document)

                jobs = killed_jobs(database, folder, settings.kills, settings.seed, progress, note)
            outcomes = [jobs.kills, jobs.ends]
            succeeded &= not any(each.failures for each in outcomes)
            shown += [Text(f"{kind}, killed: {jobs.facts['killed']}"), *_lines(kind, outcomes)]
            _write(settings, document)
        if settings.load_trials:
            most = settings.sqlite_workers if kind == "sqlite" else settings.postgresql_workers
            with _database(kind) as (database, _):
                done = loads(database, settings.load_trials, most, progress)
            found["load"] = facts_of(done)
            succeeded &= not any(load.lost_or_doubled for load in done)
            shown.append(_load_table(kind, done))
            _write(settings, document)
    if settings.watchers:
        with _database("sqlite") as (database, folder):
            found_crowd = crowd(database, folder, settings.watchers, progress)
        document["watchers"] = found_crowd.facts
        succeeded &= not found_crowd.failures
        shown += _crowd_lines(found_crowd)
        _write(settings, document)
    return Report(Group(*shown), succeeded=succeeded)


@contextmanager
def _database(kind: str) -> Iterator[tuple[str, Path]]:
    """Yield the address of an empty database, and a folder."""
    with TemporaryDirectory(prefix="sdtune-service-") as name:
        folder = Path(name)
        if kind == "sqlite":
            yield f"sqlite:///{folder / 'service.db'}", folder
        else:
            with postgres() as url:
                yield url, folder


def _write(settings: ServiceEvaluation, document: dict[str, Any]) -> None:
    if settings.out is not None:
        whole = stamped(document, torch.device("cpu"))
        write_atomically(settings.out, json.dumps(whole, indent=1).encode(), what="the results", error=ConfigError)


def _lines(kind: str, outcomes: list[CheckOutcome]) -> list[Text]:
    counts = [f"{kind}, {each.name}: {each.num_cases} cases, {len(each.failures)} failures" for each in outcomes]
    return [Text(line) for line in (*counts, *(failure for each in outcomes for failure in each.failures))]


def _crowd_lines(found: Crowd) -> list[Text]:
    statuses = ", ".join(f"{number} x {status}" for status, number in sorted(found.statuses.items()))
    before, crowded = found.megabytes
    return [
        Text(f"{found.num_clients} watchers: {statuses}; {found.served} served at the end"),
        Text(
            f"memory {before:.0f} MB before and {crowded:.0f} MB with all; good answer {found.calm_seconds:.1f} s after they went"
        ),
        *map(Text, found.failures),
    ]


def _load_table(kind: str, done: list[Load]) -> Table:
    table = figures_table(
        f"{kind}: short trials",
        "processes",
        "trials",
        "trials/s",
        "processor ms/trial",
        "bytes/trial",
        "lost or doubled",
    )
    for load in done:
        per_trial = 1000 * load.processor_seconds / load.trials
        table.add_row(
            str(load.workers),
            str(load.trials),
            f"{load.trials_per_second:.1f}",
            f"{per_trial:.1f}",
            f"{load.bytes_per_trial:.0f}",
            str(load.lost_or_doubled),
        )
    return table
