"""Finished trials on disk: one Optuna study per search, in SQLite, or in PostgreSQL for several hosts.

A trial is on disk before the next begins. A stored study holds its identity, and is resumed only with the same model, data
and space. Several processes may work on one study: each trial names the lease of the process that runs it, and is closed by others
only when that process is dead. Optuna's own heartbeats run under `study.optimize` alone, and trials here are asked for one by one.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import optuna
import sqlalchemy.exc
from optuna.trial import TrialState as OptunaState

from decoding.errors import first_line, one_line
from studies.contract import Study, StudySetup, TrialRecord, TrialState
from tuner.databases import make_private, refuse_unusable_database, sqlite_path
from tuner.errors import StorageError, StorageOutageError
from tuner.leases.process import Process
from tuner.leases.table import GRACE_SECONDS, LEASES_TABLE, Lease, LeaseHeldError, LeaseTable, attempt
from tuner.review.document import described

FAILURES = (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError)
"""Errors of a storage that is locked, full, damaged or unreachable."""
RECORD = "record"
IDENTITY = "identity"
CONFIGURATION = "model_configuration"
"""Note of a study: hash of the configuration of its model's checkpoint, which is known before the model is loaded."""
KEPT = "kept"
PREPARATION = "preparation_seconds"
METRIC = "speed-up over plain decoding"
"""Name of the objective in Optuna's dashboard."""
CANDIDATE, REASON = "candidate", "reason"
"""Attributes of a trial for readers of the dashboard: draft and rule in words, and why it was pruned or failed."""
RUNS = "run_seconds"
"""Seconds of every run of a search, a note for each run: everything from its command on that counts, not trials alone."""
WORKER = "worker"
"""Lease of the process that runs a trial."""
FINISHED = "result"
"""Note of an experiment: the result of its last whole run, and the command that gave it."""
TABLES = ("studies", LEASES_TABLE)
"""Tables of which a database of ours has one. The tuning service's database has leases before it has studies."""
LOCK_SECONDS = 60
"""Seconds to wait for a SQLite file that another process is writing to."""


class StudyStore:
    """The studies of one experiment in one storage, and the owner of all their records.

    Each stored record is parsed once. Raises `StorageError`, in one line, for errors that the user can correct.
    """

    def __init__(
        self, url: str, experiment: str, *, process: Process | None = None, grace: float = GRACE_SECONDS
    ) -> None:
        self.url = url
        self.experiment = experiment
        self._process, self._grace = process, grace
        self._worker: TrialWorker | None = None
        self._read: dict[str, StoredStudy] = {}
        """By study name: every study whose records have been asked for."""
        self._opened: list[str] = []
        refuse_unusable_database(url, what="the storage", tables=TABLES, error=StorageError)
        self._made = [path for path in [sqlite_path(url)] if path is not None and not path.exists()]
        make_private(url)
        try:
            # Also when another process creates the same tables.
            attempt(self._open)
        except (sqlalchemy.exc.SQLAlchemyError, ImportError, OSError, RuntimeError, ValueError) as cause:
            kind = StorageOutageError if isinstance(cause, sqlalchemy.exc.OperationalError) else StorageError
            raise kind(f"cannot open the storage {url}: {_reason(cause)}") from None

    def _open(self) -> None:
        if sqlite_path(self.url) is None:
            # Optuna fails where another process creates the same tables, and would leave pooled connections open.
            made = optuna.storages.RDBStorage(self.url, engine_kwargs={"poolclass": sqlalchemy.pool.NullPool})
            made.remove_session()
        settings = {"connect_args": {"timeout": LOCK_SECONDS}} if sqlite_path(self.url) else {"pool_pre_ping": True}
        # A file made here has the schema of this Optuna, whose check loads all its migrations.
        self._storage = optuna.storages.RDBStorage(
            self.url, engine_kwargs=settings, skip_compatibility_check=bool(self._made)
        )

    def discard_if_new(self) -> None:
        """Remove the SQLite file if this store created it, for a search that cannot begin, unless another process uses it."""
        here = self._process or Process.current()
        others = [holder for holder in self._leases().holders("") if holder.process != here]
        in_use = bool(others or optuna.get_all_study_names(self._storage))
        self._storage.remove_session()
        if not in_use:
            for path in self._made:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the connections; leases that are held are given back, unless the storage fails."""
        if self._worker is not None:
            with suppress(*FAILURES):  # the search has said so, and others see that this process has ended
                self._worker.lease.release()
            self._worker = None
        self._storage.remove_session()
        self._storage.engine.dispose()

    def exclusive(self, patience: float = 0.0) -> Lease:
        """Return the lease of the whole experiment, which one search holds at a time; wait `patience` seconds for it.

        Raises `StorageError`, which names the holder, if another search works on the experiment.
        """
        try:
            return self._leases().take(f"search {self.experiment}", patience=patience)
        except LeaseHeldError as held:
            raise StorageError(
                f"another search works on the experiment {self.experiment!r} in {self.url}: {held.holder.process}, last heard of "
                f"{held.holder.last_heard}; wait for its end, or choose another --experiment"
            ) from None

    def _leases(self) -> LeaseTable:
        try:
            return LeaseTable(self._storage.engine, process=self._process, grace=self._grace)
        except sqlalchemy.exc.SQLAlchemyError as cause:
            raise StorageError(f"cannot use the storage {self.url}: {_reason(cause)}") from None

    def _as_worker(self) -> TrialWorker:
        if self._worker is None:
            self._worker = TrialWorker(self._leases())
        return self._worker

    def open(self, study: Study, identity: Mapping[str, Any], *, preparation_seconds: float = 0.0) -> StoredStudy:
        """Return the stored study of this search, created if it is new.

        `preparation_seconds` is the time that creating the study took, stored if it is new. Raises `StorageError` if the stored
        study has another identity (model, data, space).
        """
        name = f"{self.experiment}/{study.name}"
        setup = study.setup()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            try:
                # One process creates a study as a whole; the others wait, and find it.
                with self._leases().take(f"creation of {name}", patience=2 * self._grace):
                    self._discard_half_made(name)
                    stored = optuna.create_study(
                        study_name=name,
                        storage=self._storage,
                        direction="maximize",
                        sampler=setup.sampler,
                        pruner=optuna.pruners.WilcoxonPruner(p_threshold=0.1, n_startup_steps=3),
                        load_if_exists=True,
                    )
                    if IDENTITY not in stored.user_attrs:
                        stored.set_metric_names([METRIC])
                    return self._checked(stored, setup, {**identity, "space": setup.space}, preparation_seconds)
            except sqlalchemy.exc.SQLAlchemyError as cause:
                raise StorageError(f"cannot use the storage {self.url}: {_reason(cause)}") from None

    def check_identity(self, identity: Mapping[str, Any]) -> None:
        """Raise `StorageError` if a stored study of this experiment was a search with another model, data, device or decoding."""
        wanted = json.loads(json.dumps(identity))
        for study in self._studies():
            known = dict(study.user_attrs.get(IDENTITY, wanted))
            known.pop("space", None)
            if differing := _difference(known, wanted):
                raise self._other(study.study_name, differing)

    def check_configuration(self, configuration: str) -> None:
        """Raise `StorageError` if a stored study of this experiment had a model of another configuration."""
        for study in self._studies():
            if study.user_attrs.get(CONFIGURATION, configuration) != configuration:
                raise self._other(study.study_name, "model")

    def _other(self, study: str, differing: str) -> StorageError:
        return StorageError(
            f"study {study!r} in {self.url} was a search with another {differing}: choose another --experiment or --storage to "
            "keep the two apart"
        )

    def kept(self, study: str) -> Any:
        """Return `StudySetup.kept` of a stored study, or None if no study of that name is stored."""
        stored = self._whole(study)
        return None if stored is None else stored.user_attrs.get(KEPT)

    def find(self, study: str) -> StoredStudy | None:
        """Return a stored study of any identity, to be read, or None if no study of that name is stored."""
        stored = self._whole(study)
        return None if stored is None else self._stored(stored)

    def include(self, study: str) -> None:
        """Count a stored study among those opened here, which another process may have run to its end."""
        name = f"{self.experiment}/{study}"
        if name not in self._opened and self.find(study) is not None:
            self._opened.append(name)

    def records(self) -> list[TrialRecord]:
        """Return the finished trials of all studies opened here, in the order in which they were opened."""
        return [record for name in self._opened for record in self._read[name].records()]

    def noted(self, key: str) -> Any:
        """Return the note `key` of the first study of this experiment that has it, or None."""
        values = (study.user_attrs.get(key) for study in self._studies())
        return next((value for value in values if value is not None), None)

    def keep(self, key: str, value: Any) -> None:
        """Store a note of this experiment, in place of an earlier one of that name; nothing if no study was opened yet."""
        studies = list(self._studies())
        for holder in [*(study for study in studies if key in study.user_attrs), *studies][:1]:
            holder.set_user_attr(key, value)

    def spent_seconds(self, names: Collection[str] | None = None) -> float:
        """Return the seconds of all finished trials and of preparing the studies: of `names`, or of all in this experiment."""
        spent = 0.0
        for study in self._studies():
            if names is None or study.study_name.removeprefix(f"{self.experiment}/") in names:
                spent += study.user_attrs.get(PREPARATION, 0.0)
                spent += sum(record.seconds for record in self._stored(study).records())
        return spent

    def note_elapsed(self, run: str, seconds: float) -> None:
        """Store the seconds of a run so far, beside the study opened last; nothing if no study was opened yet."""
        for name in self._opened[-1:]:
            self._read[name].note(f"{RUNS} {run}", seconds)

    def elapsed_before(self) -> float:
        """Return the seconds of all runs of this experiment; of trials and preparation where no run has noted its own."""
        runs: dict[str, float] = {}
        for study in self._studies():
            attributes = study.user_attrs
            noted = {key.removeprefix(f"{RUNS} "): of for key, of in attributes.items() if key.startswith(f"{RUNS} ")}
            for run, seconds in {
                **attributes.get(RUNS, {}),
                **noted,
            }.items():  # one note for all runs: earlier versions
                runs[run] = max(seconds, runs.get(run, 0.0))
        return sum(runs.values()) if runs else self.spent_seconds()

    def _stored(self, study: optuna.Study) -> StoredStudy:
        """Return the stored study, the same object for every caller, so that records are in one place."""
        return self._read.setdefault(study.study_name, StoredStudy(study, self.url, self._as_worker))

    def _studies(self) -> Iterator[optuna.Study]:
        for name in optuna.get_all_study_names(self._storage):
            if (
                name.rpartition("/")[0] == self.experiment
            ):  # an experiment may have a slash in its name, a study has none
                yield optuna.load_study(study_name=name, storage=self._storage)

    def _whole(self, study: str) -> optuna.Study | None:
        """Return the study of that name, unless its creation was interrupted."""
        name = f"{self.experiment}/{study}"
        return next((each for each in self._studies() if each.study_name == name and IDENTITY in each.user_attrs), None)

    def _discard_half_made(self, name: str) -> None:
        """Remove a study whose creation was killed: it has no trials yet, and is created again."""
        for study in self._studies():
            if study.study_name == name and IDENTITY not in study.user_attrs:
                optuna.delete_study(study_name=name, storage=self._storage)

    def _checked(
        self, stored: optuna.Study, setup: StudySetup, identity: dict[str, Any], preparation_seconds: float
    ) -> StoredStudy:
        known = stored.user_attrs.get(IDENTITY)
        if known is None:
            for start in setup.starts:
                stored.enqueue_trial(dict(start))
            stored.set_user_attr(KEPT, setup.kept)
            stored.set_user_attr(PREPARATION, preparation_seconds)
            # Last, so that a study whose creation was killed is not taken for complete.
            stored.set_user_attr(IDENTITY, json.loads(json.dumps(identity)))
        elif differing := _difference(known, json.loads(json.dumps(identity))):
            raise self._other(stored.study_name, differing)
        self._read[stored.study_name] = found = StoredStudy(stored, self.url, self._as_worker)
        if stored.study_name not in self._opened:
            self._opened.append(stored.study_name)
        found.sweep()
        return found


class TrialWorker:
    """This process as a worker: the lease that its trials name, and what it knows of the leases of others."""

    def __init__(self, leases: LeaseTable) -> None:
        self._leases = leases
        self.lease = leases.take(f"worker {uuid4().hex}")
        self._nameless: dict[int, float] = {}
        """When a running trial was first seen that names no worker, by number, in seconds of this process's clock."""

    @property
    def mark(self) -> list[str]:
        """Name and token of the lease, as a trial keeps them."""
        return [self.lease.name, self.lease.token]

    def runs_no_longer(self, trial: optuna.trial.FrozenTrial) -> bool:
        """Return True if the worker of a running trial is dead.

        A trial names no worker for the moment after it was asked for, and if an earlier version began it. It is given the time
        after which a silent worker counts as dead.
        """
        mark = trial.user_attrs.get(WORKER)
        if mark is None:
            seen = self._nameless.setdefault(trial.number, time.monotonic())
            return time.monotonic() - seen > self._leases.grace
        return mark != self.mark and not self._leases.is_held(*mark)


class StoredStudy:
    """One study on disk, with its records in memory."""

    def __init__(self, study: optuna.Study, url: str, worker: Callable[[], TrialWorker]) -> None:
        self._study = study
        self.url = url
        self._worker = worker
        self._records: dict[int, TrialRecord] = {}
        """By trial number."""

    def sweep(self) -> None:
        """Close the running trials of dead processes; only their measurements are lost."""
        for trial in self._study.get_trials(deepcopy=False, states=(OptunaState.RUNNING,)):
            if self._worker().runs_no_longer(trial):
                self._close(trial.number, trial.user_attrs.get(RECORD))

    def records(self) -> list[TrialRecord]:
        """Return the finished trials of all processes, by number."""
        for trial in self._study.get_trials(deepcopy=False):
            if trial.number not in self._records and (stored := trial.user_attrs.get(RECORD)) is not None:
                self._records[trial.number] = _parsed(stored, self._study.study_name, self.url)
        return [self._records[number] for number in sorted(self._records)]

    def ask(self) -> optuna.Trial:
        """Begin a trial."""
        trial = self._study.ask()
        trial.set_user_attr(WORKER, self._worker().mark)
        return trial

    def finish(self, trial: optuna.Trial, record: TrialRecord) -> None:
        """Write a finished trial to disk and add its record.

        Raises `LeaseLostError` if another process closed the trial, as this one was silent for too long.
        """
        try:
            trial.set_user_attr(CANDIDATE, described(record))
            if record.reason is not None:
                trial.set_user_attr(REASON, record.reason)
            trial.set_user_attr(RECORD, record.model_dump_json())
        except optuna.exceptions.UpdateFinishedTrialError:
            raise self._worker().lease.lost() from None
        self._records[trial.number] = record
        self._tell(trial.number, record)

    def correct_report(self, trial: optuna.Trial, *, step: int, value: float) -> None:
        """Replace a value that was reported for a step of a running trial, which `trial.report` would keep."""
        trial.storage.set_trial_intermediate_value(trial._trial_id, step, value)

    def abandon(self, trial: optuna.Trial) -> None:
        """Close a trial that ends without a record."""
        self._close(trial.number, None)

    def _close(self, number: int, stored: str | None) -> None:
        """Close a running trial, with its record if its process wrote one before it died."""
        if stored is None:
            self._study.tell(number, state=OptunaState.FAIL, skip_if_finished=True)
        else:
            self._tell(number, TrialRecord.model_validate_json(stored))

    def _tell(self, number: int, record: TrialRecord) -> None:
        # Another process may have closed it, from the record that is on disk.
        if record.state is TrialState.COMPLETE:
            self._study.tell(number, record.speedup, skip_if_finished=True)
        else:
            state = OptunaState.PRUNED if record.state is TrialState.PRUNED else OptunaState.FAIL
            self._study.tell(number, state=state, skip_if_finished=True)

    def note(self, key: str, value: Any) -> None:
        """Store a note beside the trials."""
        self._study.set_user_attr(key, value)

    def noted(self, key: str) -> Any:
        """Return the note `key`, or None."""
        return self._study.user_attrs.get(key)


def _parsed(record: str, study: str, url: str) -> TrialRecord:
    """Return a stored record; raise `StorageError` for one that cannot be read."""
    try:
        return TrialRecord.model_validate_json(record)
    except (ValueError, ArithmeticError) as cause:
        raise StorageError(
            f"a trial of the study {study!r} in {url} cannot be read ({one_line(cause)[:120]}): choose another --experiment"
        ) from None


def unusable(url: str, cause: Exception) -> StorageOutageError:
    """Return the error of a storage that failed with one of `FAILURES`, in one line."""
    return StorageOutageError(f"cannot use the storage {url}: {_reason(cause)}; finished trials stay in it")


def sqlite_url(path: Path) -> str:
    """Return the storage URL of a SQLite file."""
    return f"sqlite:///{path}"


def elapsed_of(url: str, experiment: str) -> float:
    """Return the seconds that earlier runs of a search took, 0 if nothing is stored; creates no file.

    Raises `StorageError` if the storage cannot be opened.
    """
    path = sqlite_path(url)
    return 0.0 if path is not None and not path.exists() else StudyStore(url, experiment).elapsed_before()


def noted_in(url: str, experiment: str, key: str) -> Any:
    """Return a note of a search, or None; creates no file. Raises `StorageError` if the storage cannot be opened."""
    path = sqlite_path(url)
    if path is not None and not path.exists():
        return None
    store = StudyStore(url, experiment)
    try:
        return store.noted(key)
    finally:
        store.close()


def refuse_other_configuration(url: str, experiment: str, configuration: str) -> None:
    """Raise `StorageError` if a stored study of the experiment had a model of another configuration; creates no file."""
    path = sqlite_path(url)
    if path is not None and not path.exists():
        return
    store = StudyStore(url, experiment)
    try:
        store.check_configuration(configuration)
    except FAILURES as cause:
        raise unusable(url, cause) from None
    finally:
        store.close()


def _difference(known: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """Return the names of the keys that differ, in words, or None; of a nested document, such as the space, those inside it too."""
    named = []
    for key in _differing(known, wanted):
        inner = known.get(key), wanted.get(key)
        nested = _differing(*inner) if all(isinstance(each, dict) for each in inner) else []
        words = " and ".join(map(_in_words, nested))
        named.append(f"{_in_words(key)} ({words})" if nested else _in_words(key))
    return " and ".join(named) or None


def _differing(known: Any, wanted: Any) -> list[str]:
    return [key for key in sorted({*known, *wanted}) if known.get(key) != wanted.get(key)]


def _in_words(key: str) -> str:
    return key.replace("_", " ")


def _reason(cause: BaseException) -> str:
    if isinstance(cause, optuna.exceptions.StorageInternalError) and cause.__cause__ is not None:
        cause = cause.__cause__
    origin = getattr(cause, "orig", None) or cause
    return first_line(origin)
