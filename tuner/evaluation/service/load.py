"""Many short trials of one study by several processes: what keeping a trial costs, and how many a second a storage takes.

The trials measure nothing: their speed-ups are planted. So all that is timed is what a search does for a trial beside measuring it:
asking, choosing, storing, reading the trials of others.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy as sa

from studies.contract import TrialRecord
from tuner.databases import sqlite_path
from tuner.errors import SearchError
from tuner.evaluation.short_trials import NUM_PROMPTS, PlantedBench, PlantedStudy
from tuner.executors.local import LocalExecutor
from tuner.progress import Progress
from tuner.search.budget import Budget
from tuner.search.storage import StudyStore
from tuner.search.trials import run_study

START_SECONDS = 600.0
"""Time for all processes to be ready, on a busy machine."""
LIMIT_SECONDS = 7200.0
"""After this the processes count as hanging."""


@dataclass(frozen=True)
class Load:
    """What one number of processes made of the trials."""

    workers: int
    trials: int
    seconds: float
    """From the moment that all were ready to the end of the last."""
    processor_seconds: float
    """Of the processes together, without the database's."""
    bytes_per_trial: float
    """Growth of the database by a trial."""
    lost_or_doubled: int

    @property
    def trials_per_second(self) -> float:
        """Trials of all processes together."""
        return self.trials / self.seconds


def loads(database: str, num_trials: int, most_workers: int, progress: Progress) -> list[Load]:
    """Run `num_trials` trials by 1, 2, 4 ... `most_workers` processes, each number in a study of its own."""
    counts = sorted(
        {most_workers, *(2**power for power in range(most_workers.bit_length()) if 2**power <= most_workers)}
    )
    found = []
    for count in counts:
        progress.stage(f"{num_trials} short trials by {count} processes", 1)
        found.append(_loaded(database, num_trials, count))
        progress.advance()
    return found


def facts_of(found: Sequence[Load]) -> list[Mapping[str, Any]]:
    """Return loads as plain data."""
    return [{**asdict(load), "trials_per_second": load.trials_per_second} for load in found]


def _loaded(database: str, num_trials: int, num_workers: int) -> Load:
    experiment = f"load-{num_workers}"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    barrier, results = context.Barrier(num_workers + 1), context.Queue()
    arguments = (database, experiment, num_trials, barrier, results)
    processes = [context.Process(target=work, args=arguments) for _ in range(num_workers)]
    for process in processes:
        process.start()
    with suppress(threading.BrokenBarrierError):  # of a process that failed, and says why
        barrier.wait(START_SECONDS)
    start, before = time.perf_counter(), _stored_bytes(database)
    used = [results.get(timeout=LIMIT_SECONDS) for _ in processes]
    seconds = time.perf_counter() - start
    for process in processes:
        process.join()
    if failed := [each for each in used if isinstance(each, str)]:
        raise SearchError(f"{len(failed)} of {num_workers} processes failed: {failed[0]}")
    numbers = Counter(number for own, _ in used for number in own)
    trials = max(numbers) + 1
    wrong = sum(numbers[number] != 1 for number in range(trials)) + abs(
        len(stored_trials(database, experiment)) - trials
    )
    grown = (_stored_bytes(database) - before) / trials
    return Load(num_workers, trials, seconds, sum(spent for _, spent in used), grown, wrong)


def work(database: str, experiment: str, num_trials: int, barrier: Barrier | threading.Barrier, results: Any) -> None:
    """Run trials until there are `num_trials` of all processes; answer with the own numbers and the processor seconds."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    made: list[int] = []
    try:
        store = StudyStore(database, experiment)
        study = PlantedStudy()
        stored = store.open(study, {})
        barrier.wait(START_SECONDS)
        before = sum(os.times()[:2])
        run_study(
            study, stored, LocalExecutor(PlantedBench()), range(NUM_PROMPTS), Budget(num_trials, None), _note_in(made)
        )
        results.put((made, sum(os.times()[:2]) - before))
        store.close()
    except Exception as failure:  # told to the process that waits for the answer, which raises
        barrier.abort()
        results.put(f"{type(failure).__name__}: {failure}")


def _note_in(made: list[int]) -> Any:
    return lambda record: made.append(record.number)


def stored_trials(database: str, experiment: str) -> list[TrialRecord]:
    """Return the trials of a load, by number."""
    store = StudyStore(database, experiment)
    try:
        found = store.find(PlantedStudy.name)
        return [] if found is None else found.records()
    finally:
        store.close()


def _stored_bytes(database: str) -> int:
    path = sqlite_path(database)
    if path is not None:
        return sum(each.stat().st_size for each in (path, Path(f"{path}-wal")) if each.exists())
    engine = sa.create_engine(database, poolclass=sa.pool.NullPool)
    with engine.connect() as connection:
        return int(connection.execute(sa.text("SELECT pg_database_size(current_database())")).scalar_one())
