"""Finished trials on disk: one Optuna study per study of a search, in SQLite, or in PostgreSQL for several hosts.

A trial's record is on disk before the next begins. A stored study holds its identity, and is resumed only with the same model, data
and space. Several processes may work on one search: the trials of dead ones are failed by Optuna's heartbeat, and what one process
does for all is done under a lock, which the system gives back when its holder dies.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy.exc
from filelock import FileLock, Timeout
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from decoding.errors import first_line, one_line
from studies.contract import TrialRecord
from studies.samplers.contract import BEGUN, RECORD, StudySampler
from tuner.databases import TABLES, attempt, check_address, make_private, refuse_unusable_database, sqlite_path
from tuner.errors import StorageError, StorageOutageError, without_password

FAILURES = (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError)
"""Errors of a storage that is locked, full, damaged or unreachable."""
IDENTITY = "identity"
CONFIGURATION = "model_configuration"
"""Note of a study: hash of the configuration of its model's checkpoint, which is known before the model is loaded."""
PREPARATION = "preparation_seconds"
METRIC = "speed-up over plain decoding"
"""Name of the objective in Optuna's dashboard."""
CANDIDATE, REASON = "candidate", "reason"
"""Attributes of a trial for readers of the dashboard: draft and rule in words, and why it was pruned or failed."""
RETRY_OF = "retry_of"
"""Attribute of a trial: the trial of a dead process whose parameters it has."""
RUNS = "run"
"""Notes of a search: when each run of it began and was last heard of, in seconds since 1970."""
LOGGING = "\0logging"
"""What is locked while a trial is logged in MLflow; no experiment's name ends with it."""
FINISHED = "result"
"""Note of an experiment: the result of its last whole run, and the command that gave it."""
LOCK_SECONDS = 60
"""Seconds to wait for a SQLite file that another process is writing to."""
BEAT_SECONDS, GRACE_SECONDS = 5, 15
"""Seconds between two signs of life of a running trial, and of silence after which its process counts as dead."""
POLL_SECONDS = 0.2
"""Seconds between two looks at what other processes do."""


class StudyStore:
    """The studies of one experiment in one storage, and the owner of all their records.

    Each stored record is parsed once. Raises `StorageError`, in one line, for errors that the user can correct.
    """

    def __init__(self, url: str, experiment: str) -> None:
        self.url = url
        self.experiment = experiment
        self._read: dict[str, StoredStudy] = {}
        """By study name: every study whose records have been asked for."""
        self._opened: list[str] = []
        _check(url)
        self._made = [path for path in [sqlite_path(url)] if path is not None and not path.exists()]
        make_private(url)
        try:
            self._storage = _opened(url, is_new=bool(self._made))
        except (sqlalchemy.exc.SQLAlchemyError, ImportError, OSError, RuntimeError, ValueError) as cause:
            kind = StorageOutageError if isinstance(cause, sqlalchemy.exc.OperationalError) else StorageError
            raise kind(f"cannot open the storage {url}: {_reason(cause)}") from None

    def discard_if_new(self) -> None:
        """Remove the SQLite file if this store created it, for a search that cannot begin, unless another process uses it."""
        is_used = bool(optuna.get_all_study_names(self._storage))
        self._storage.remove_session()
        if not is_used:
            for path in self._made:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the connections."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    @contextmanager
    def lock(self, most_seconds: float | None = None, *, what: str = "") -> Iterator[None]:
        """Hold the lock of the experiment, or of `what` in it, which one process has at a time; wait for `most_seconds` at most.

        Raises `StorageError` if another process keeps it for longer.
        """
        key = hashlib.sha256(f"{self.experiment}{what}".encode()).hexdigest()[:8]
        path, dialect = sqlite_path(self.url), self._storage.engine.dialect.name
        if path is not None:
            held = _file_lock(Path(f"{path}-{key}.lock"), most_seconds)
        elif dialect == "postgresql":
            held = _advisory_lock(self._storage.engine, int(key, 16), most_seconds)
        elif dialect == "sqlite":
            held = nullcontext()  # in memory: no other process sees it
        else:
            raise StorageError(
                f"a storage in {dialect} cannot be locked: give sqlite:///FILE or postgresql://HOST/NAME"
            )
        with ExitStack() as stack:
            try:
                stack.enter_context(held)
            except Timeout:
                raise StorageError(
                    f"another process has held the search {self.experiment!r} in {without_password(self.url)} for "
                    f"{most_seconds:.0f} s: give the same command again later, and it shows the result"
                ) from None
            except (OSError, sqlalchemy.exc.SQLAlchemyError) as cause:
                raise unusable(self.url, cause) from None
            yield

    def open(
        self,
        sampler: StudySampler,
        identity: Mapping[str, Any],
        *,
        elapsed: Callable[[], float] = time.perf_counter,
    ) -> StoredStudy:
        """Return the stored study of this search, which the sampler begins or resumes; to be called under the lock.

        What `elapsed` grows meanwhile is stored as the time of preparing a new study. Raises `StorageError` if the stored study has
        another identity (model, data, space).
        """
        name, before = f"{self.experiment}/{sampler.name}", elapsed()
        with _as_one_line(self.url), _experimental():
            self._discard_half_made(name)
            stored = optuna.create_study(
                study_name=name, storage=self._storage, direction="maximize", sampler=sampler, load_if_exists=True
            )
            wanted = json.loads(json.dumps({**identity, "space": sampler.identity()}))
            known = stored.user_attrs.get(IDENTITY)
            if known is not None and (differing := _difference(known, wanted)):
                raise self._other(stored.study_name, differing)
            sampler.begin(stored)
            if known is None:
                stored.set_metric_names([METRIC])
                stored.set_user_attr(PREPARATION, elapsed() - before)
                # Last: a study whose creation was killed is not taken for complete.
                stored.set_user_attr(IDENTITY, wanted)
        self._read[name] = found = StoredStudy(stored, self.url)
        if name not in self._opened:
            self._opened.append(name)
        return found

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

    def find(self, study: str) -> StoredStudy | None:
        """Return a stored study of any identity, to be read, or None if no study of that name is stored."""
        stored = self._whole(study)
        return None if stored is None else self._stored(stored)

    def records(self) -> list[TrialRecord]:
        """Return the finished trials of all studies opened here, in the order in which they were opened."""
        return [record for name in self._opened for record in self._read[name].records()]

    def close_trials(self) -> None:
        """Fail what still waits or runs in the studies opened here, once the search has its result."""
        for name in self._opened:
            self._read[name].close_trials()

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

    def note_run(self, run: str, seconds: float) -> None:
        """Store the seconds that a run has taken until now; nothing if no study was opened yet."""
        now = time.time()
        for name in self._opened[-1:]:
            self._read[name].note(f"{RUNS} {run}", [now - seconds, now])

    def elapsed_before(self) -> float:
        """Return the seconds in which any run of this experiment was under way."""
        spans = [
            span for study in self._studies() for key, span in study.user_attrs.items() if key.startswith(f"{RUNS} ")
        ]
        elapsed, until = 0.0, 0.0
        for begun, ended in sorted(spans):
            elapsed += max(0.0, ended - max(begun, until))
            until = max(until, ended)
        return elapsed

    def _stored(self, study: optuna.Study) -> StoredStudy:
        """Return the stored study, the same object for every caller, so that records are in one place."""
        return self._read.setdefault(study.study_name, StoredStudy(study, self.url))

    def _studies(self) -> Iterator[optuna.Study]:
        for name in optuna.get_all_study_names(self._storage):
            # An experiment may have a slash in its name, a study has none.
            if name.rpartition("/")[0] == self.experiment:
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


class StoredStudy:
    """One study on disk, with its records in memory."""

    def __init__(self, study: optuna.Study, url: str) -> None:
        self.study = study
        self.url = url
        self._records: dict[int, TrialRecord] = {}
        """By trial number."""
        self._met: set[int] = set()
        """Trials that were running when this process waited."""

    def records(self) -> list[TrialRecord]:
        """Return the finished trials of all processes, by number."""
        for trial in self.study.get_trials(deepcopy=False):
            if trial.number not in self._records and (stored := trial.user_attrs.get(RECORD)) is not None:
                self._records[trial.number] = _parsed(stored, self.study.study_name, self.url)
        return [self._records[number] for number in sorted(self._records)]

    def keep(self, trial: optuna.Trial, record: TrialRecord) -> None:
        """Write the record of a trial to disk."""
        trial.set_user_attr(CANDIDATE, record.candidate.describe(parameters=True))
        if record.reason is not None:
            trial.set_user_attr(REASON, record.reason)
        trial.set_user_attr(RECORD, record.model_dump_json())
        self._records[trial.number] = record

    def wait(self) -> None:
        """Wait a moment for other processes, and fail the trials of dead ones.

        Optuna takes no trial for dead that never gave a sign of life. Each that runs gets one from here, in place of a process that
        died before its first.
        """
        time.sleep(POLL_SECONDS)
        storage = self.study._storage
        assert isinstance(storage, BaseHeartbeat)
        for trial in self.study.get_trials(deepcopy=False, states=(OptunaState.RUNNING,)):
            if trial.number not in self._met:
                self._met.add(trial.number)
                storage.record_heartbeat(trial._trial_id)
        with _experimental():
            optuna.storages.fail_stale_trials(self.study)

    def wait_for_others(self) -> None:
        """Wait until no other process runs a trial, also none whose record is written and not yet shown and tracked."""
        while self.study.get_trials(deepcopy=False, states=(OptunaState.RUNNING,)):
            self.wait()

    def close_trials(self) -> None:
        """Fail all trials that still wait or run."""
        for trial in self.study.get_trials(deepcopy=False, states=(OptunaState.WAITING, OptunaState.RUNNING)):
            with suppress(optuna.exceptions.UpdateFinishedTrialError):
                self.study._storage.set_trial_state_values(trial._trial_id, OptunaState.FAIL)

    def note(self, key: str, value: Any) -> None:
        """Store a note beside the trials."""
        self.study.set_user_attr(key, value)

    def noted(self, key: str) -> Any:
        """Return the note `key`, or None."""
        return self.study.user_attrs.get(key)


class _Storage(optuna.storages.RDBStorage):
    """Optuna's storage, in which what is on disk counts."""

    def record_heartbeat(self, trial_id: int) -> None:
        """Leave out a sign of life that the database refuses: the next one counts as well."""
        with suppress(*FAILURES):
            super().record_heartbeat(trial_id)

    def set_trial_state_values(self, trial_id: int, state: OptunaState, values: Sequence[float] | None = None) -> bool:
        """End a trial as its record says: its process may have died between the record and this call."""
        if state is OptunaState.FAIL and (stored := self.get_trial(trial_id).user_attrs.get(RECORD)) is not None:
            record = TrialRecord.model_validate_json(stored)
            state = OptunaState[record.state.name]
            values = None if record.speedup is None else [record.speedup]
        return super().set_trial_state_values(trial_id, state, values)


def _experimental() -> AbstractContextManager[Any]:
    """Let Optuna say nothing of what it calls experimental: heartbeats, names of metrics."""
    return warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning)


def _opened(url: str, *, is_new: bool) -> optuna.storages.RDBStorage:
    is_file = sqlite_path(url) is not None
    if not is_file:
        # Optuna fails where another process creates the same tables, and would leave pooled connections open.
        engine = {"poolclass": sqlalchemy.pool.NullPool}
        attempt(lambda: optuna.storages.RDBStorage(url, engine_kwargs=engine).remove_session())
    settings = {"connect_args": {"timeout": LOCK_SECONDS}} if is_file else {"pool_pre_ping": True}
    found: list[optuna.storages.RDBStorage] = []
    with _experimental():
        attempt(
            lambda: found.append(
                _Storage(
                    url,
                    engine_kwargs=settings,
                    # A file made here has the schema of this Optuna, whose check loads all its migrations.
                    skip_compatibility_check=is_new,
                    heartbeat_interval=BEAT_SECONDS,
                    grace_period=GRACE_SECONDS,
                    heartbeat_stale_trial_callback=_retry,
                )
            )
        )
    return found[-1]


def _retry(study: optuna.Study, stale: FrozenTrial) -> None:
    """Enqueue the candidate of a dead process's trial once more, unless it had written its record or was a retry itself.

    Until the candidate is known the trial has a part of its parameters, or none: then only an enqueued one is tried again, whole.
    """
    candidate = stale.params if BEGUN in stale.user_attrs else stale.system_attrs.get("fixed_params")
    if candidate and not {RECORD, RETRY_OF} & set(stale.user_attrs):
        study.enqueue_trial(candidate, user_attrs={RETRY_OF: stale.number})


def _file_lock(path: Path, most_seconds: float | None) -> AbstractContextManager[Any]:
    return FileLock(path, timeout=-1 if most_seconds is None else max(0.0, most_seconds))


@contextmanager
def _advisory_lock(engine: sqlalchemy.Engine, key: int, most_seconds: float | None) -> Iterator[None]:
    """Hold a lock of PostgreSQL for as long as a connection of its own lives. Raises `Timeout`."""
    end = None if most_seconds is None else time.monotonic() + most_seconds
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while not connection.scalar(sqlalchemy.select(sqlalchemy.func.pg_try_advisory_lock(key))):
            if end is not None and time.monotonic() > end:
                raise Timeout(str(key))
            time.sleep(POLL_SECONDS)
        try:
            yield
        finally:
            with suppress(sqlalchemy.exc.SQLAlchemyError):  # a broken connection has given it back
                connection.scalar(sqlalchemy.select(sqlalchemy.func.pg_advisory_unlock(key)))


@contextmanager
def _as_one_line(url: str) -> Iterator[None]:
    try:
        yield
    except sqlalchemy.exc.SQLAlchemyError as cause:
        raise StorageError(f"cannot use the storage {url}: {_reason(cause)}") from None


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


def _check(url: str) -> None:
    check_address(url, what="the storage", error=StorageError)
    refuse_unusable_database(url, what="the storage", tables=TABLES, error=StorageError)


@contextmanager
def existing_store(url: str, experiment: str) -> Iterator[StudyStore | None]:
    """Open the store of a search to look into it, or yield None where no file is; creates none. Raises `StorageError`."""
    _check(url)
    path = sqlite_path(url)
    if path is not None and not path.exists():
        yield None
        return
    store = StudyStore(url, experiment)
    try:
        yield store
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
