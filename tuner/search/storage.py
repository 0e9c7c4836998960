"""Finished trials on disk: one Optuna study per search, in any storage Optuna knows (SQLite by default).

A trial is on disk before the next begins. A stored study holds its identity, and is resumed only with the same model, data
and space.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy.exc
from optuna.trial import TrialState as OptunaState

from decoding.errors import first_line
from studies.contract import Study, StudySetup, TrialRecord, TrialState
from tuner.errors import StorageError

RECORD = "record"
IDENTITY = "identity"
KEPT = "kept"
PREPARATION = "preparation_seconds"
RUNS = "run_seconds"
"""Seconds of every run of a search, by the run's own key: everything from its command on that counts, not trials alone."""


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
        self._made = [path for path in [_sqlite_path(url)] if path is not None and not path.exists()]
        try:
            # A file made here has the schema of this Optuna, whose check loads all its migrations.
            self._storage = optuna.storages.RDBStorage(url, skip_compatibility_check=bool(self._made))
        except (sqlalchemy.exc.SQLAlchemyError, ImportError, OSError, RuntimeError, ValueError) as cause:
            raise StorageError(f"cannot open the storage {url}: {_reason(cause)}") from None

    def discard_if_new(self) -> None:
        """Remove the SQLite file if this store created it, for a search that cannot begin."""
        self._storage.remove_session()
        for path in self._made:
            path.unlink(missing_ok=True)

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
                self._discard_half_made(name)
                stored = optuna.create_study(
                    study_name=name,
                    storage=self._storage,
                    direction="maximize",
                    sampler=setup.sampler,
                    pruner=optuna.pruners.WilcoxonPruner(p_threshold=0.1, n_startup_steps=3),
                    load_if_exists=True,
                )
            except sqlalchemy.exc.SQLAlchemyError as cause:
                raise StorageError(f"cannot use the storage {self.url}: {_reason(cause)}") from None
        return self._checked(stored, setup, {**identity, "space": setup.space}, preparation_seconds)

    def kept(self, study: str) -> Any:
        """Return `StudySetup.kept` of a stored study, or None if no study of that name is stored."""
        stored = self._whole(study)
        return None if stored is None else stored.user_attrs.get(KEPT)

    def find(self, study: str) -> StoredStudy | None:
        """Return a stored study of any identity, to be read, or None if no study of that name is stored."""
        stored = self._whole(study)
        return None if stored is None else self._stored(stored)

    def records(self) -> list[TrialRecord]:
        """Return the finished trials of all studies opened here, in the order in which they were opened."""
        return [record for name in self._opened for record in self._read[name].records()]

    def noted(self, key: str) -> Any:
        """Return the note `key` of the first study of this experiment that has it, or None."""
        values = (study.user_attrs.get(key) for study in self._studies())
        return next((value for value in values if value is not None), None)

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
            stored = self._read[name]
            stored.note(RUNS, {**(stored.noted(RUNS) or {}), run: seconds})

    def elapsed_before(self) -> float:
        """Return the seconds of all runs of this experiment; of trials and preparation where no run has noted its own."""
        runs: dict[str, float] = {}
        for study in self._studies():
            for run, seconds in study.user_attrs.get(RUNS, {}).items():
                runs[run] = max(seconds, runs.get(run, 0.0))
        return sum(runs.values()) if runs else self.spent_seconds()

    def _stored(self, study: optuna.Study) -> StoredStudy:
        """Return the stored study, the same object for every caller, so that records are in one place."""
        return self._read.setdefault(study.study_name, StoredStudy(study, self.url))

    def _studies(self) -> Iterator[optuna.Study]:
        for name in optuna.get_all_study_names(self._storage):
            if name.startswith(f"{self.experiment}/"):
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
            raise StorageError(
                f"study {stored.study_name!r} in {self.url} was a search with another {differing}: choose another "
                "--experiment or --storage to keep the two apart"
            )
        self._read[stored.study_name] = found = StoredStudy(stored, self.url)
        if stored.study_name not in self._opened:
            self._opened.append(stored.study_name)
        found.sweep()
        return found


class StoredStudy:
    """One study on disk, with its records in memory. Trials of another process since the first look are not seen."""

    def __init__(self, study: optuna.Study, url: str) -> None:
        self._study = study
        self.url = url
        self._records: list[TrialRecord] | None = None

    def sweep(self) -> None:
        """Close the running trial of a process that was killed; only its measurement is lost."""
        for trial in self._study.get_trials(deepcopy=False, states=(OptunaState.RUNNING,)):
            self._study.tell(trial.number, state=OptunaState.FAIL)

    def records(self) -> list[TrialRecord]:
        """Return the finished trials, oldest first; `finish` adds to them."""
        return list(self._parsed())

    def _parsed(self) -> list[TrialRecord]:
        """Parse the records on disk at the first call; return the list that `finish` adds to."""
        if self._records is None:
            stored = (trial.user_attrs.get(RECORD) for trial in self._study.get_trials(deepcopy=False))
            self._records = [TrialRecord.model_validate_json(record) for record in stored if record is not None]
        return self._records

    def ask(self) -> optuna.Trial:
        """Begin a trial."""
        return self._study.ask()

    def finish(self, trial: optuna.Trial, record: TrialRecord) -> None:
        """Write a finished trial to disk and add its record."""
        records = self._parsed()  # before the record is on disk, so that it is not read back as well
        trial.set_user_attr(RECORD, record.model_dump_json())
        if record.state is TrialState.COMPLETE:
            self._study.tell(trial, record.speedup)
        else:
            self._study.tell(trial, state=OptunaState.PRUNED if record.state is TrialState.PRUNED else OptunaState.FAIL)
        records.append(record)

    def note(self, key: str, value: Any) -> None:
        """Store a note beside the trials."""
        self._study.set_user_attr(key, value)

    def noted(self, key: str) -> Any:
        """Return the note `key`, or None."""
        return self._study.user_attrs.get(key)


def sqlite_url(path: Path) -> str:
    """Return the storage URL of a SQLite file."""
    return f"sqlite:///{path}"


def elapsed_of(url: str, experiment: str) -> float:
    """Return the seconds that earlier runs of a search took, 0 if nothing is stored; creates no file.

    Raises `StorageError` if the storage cannot be opened.
    """
    path = _sqlite_path(url)
    return 0.0 if path is not None and not path.exists() else StudyStore(url, experiment).elapsed_before()


def _sqlite_path(url: str) -> Path | None:
    return Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else None


def _difference(known: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """Return the names of the keys that differ, in words, or None."""
    differing = [key.replace("_", " ") for key in sorted({*known, *wanted}) if known.get(key) != wanted.get(key)]
    return " and ".join(differing) or None


def _reason(cause: Exception) -> str:
    origin = getattr(cause, "orig", None) or cause
    return first_line(origin)
