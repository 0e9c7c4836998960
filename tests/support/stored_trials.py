"""Trials as Optuna stored them, without its check of the schema: it loads all of Optuna's migrations each time."""

from __future__ import annotations

from pathlib import Path

import optuna
from optuna.trial import FrozenTrial

from studies.contract import TrialRecord
from studies.samplers.contract import RECORD
from tuner.search.storage import sqlite_url


def stored_trials(path: Path, *studies: str) -> list[FrozenTrial]:
    """Return the trials of these studies of a SQLite file in order, or of all its studies."""
    storage = optuna.storages.RDBStorage(sqlite_url(path), skip_compatibility_check=True, skip_table_creation=True)
    names = studies or optuna.get_all_study_names(storage)
    return [trial for name in names for trial in optuna.load_study(study_name=name, storage=storage).trials]


def stored_records(path: Path, *studies: str) -> list[TrialRecord]:
    """Return the records of these studies' finished trials, or of all studies'."""
    finished = [trial.user_attrs[RECORD] for trial in stored_trials(path, *studies) if RECORD in trial.user_attrs]
    return [TrialRecord.model_validate_json(record) for record in finished]
