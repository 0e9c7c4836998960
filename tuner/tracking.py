"""MLflow, and the only file that imports it: a parent run per search, a nested run per trial, all through an explicit client.

Nothing global is touched: no active run, no default tracking URI. MLflow takes seconds to import, so that waits until a
tracker is opened.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.contract import TrialRecord, TrialState
from tuner.columns import trial_metrics, trial_params
from tuner.errors import TrackingError

PARENT_TAG = "mlflow.parentRunId"
STUDY_TAG, TRIAL_TAG, STATE_TAG = "sdtune.study", "sdtune.trial", "state"
LONGEST_PARAM = 250
"""Characters of a parameter; what is longer is cut, the whole stands in the artefact `candidate.yaml`."""

STATUS = {TrialState.COMPLETE: "FINISHED", TrialState.PRUNED: "KILLED", TrialState.FAIL: "FAILED"}


@dataclass(frozen=True)
class DatasetInput:
    """The data of a search, as MLflow shows it."""

    name: str
    fingerprint: str
    source: str


class Tracker:
    """The runs of one search. `TrackingError`, in one line, if the store cannot be used."""

    def __init__(self, client: Any, experiment_id: str, run_id: str, logged: dict[tuple[str, str], str]) -> None:
        self._client = client
        self._experiment_id = experiment_id
        self.run_id = run_id
        self._logged = logged

    @classmethod
    def open(
        cls,
        tracking_uri: str,
        experiment: str,
        *,
        run_id: str | None,
        params: Mapping[str, str | int | float | bool | None],
        dataset: DatasetInput,
    ) -> Tracker:
        """Begin a parent run in `experiment`, or go on in the run `run_id` of an earlier search if it is still there."""
        with _quiet(), _one_line(tracking_uri):
            mlflow = _import_mlflow()
            client = mlflow.MlflowClient(tracking_uri=tracking_uri)
            experiment_id = _experiment_id(client, experiment, tracking_uri)
            run = _reopen(client, run_id, experiment_id) if run_id else None
            if run is None:
                run = client.create_run(experiment_id, run_name=experiment, tags={"sdtune": "search"})
                _log_dataset(mlflow, client, run.info.run_id, dataset)
            known = run.data.params
            fresh = {key: value for key, value in params.items() if key not in known and value is not None}
            client.log_batch(run.info.run_id, params=[_param(mlflow, key, value) for key, value in fresh.items()])
            return cls(client, experiment_id, run.info.run_id, _logged_trials(client, experiment_id, run.info.run_id))

    def log_trial(self, record: TrialRecord) -> str:
        """Log a trial as a nested run and return its id; a trial that is there already is left as it is."""
        key = (record.study, str(record.number))
        if key in self._logged:
            return self._logged[key]
        with _quiet(), _one_line("the tracking store"):
            mlflow = _import_mlflow()
            name = f"{record.study}/{record.number}"
            run = self._client.create_run(self._experiment_id, run_name=name, tags=_trial_tags(record, self.run_id))
            now = int(time.time() * 1000)
            metrics = [
                mlflow.entities.Metric(key, float(value), now, 0) for key, value in trial_metrics(record).items()
            ]
            params = [_param(mlflow, key, value) for key, value in trial_params(record).items()]
            self._client.log_batch(run.info.run_id, metrics=metrics, params=params)
            self._client.log_dict(run.info.run_id, record.candidate.model_dump(mode="json"), "candidate.yaml")
            self._client.set_terminated(run.info.run_id, status=STATUS[record.state])
        self._logged[key] = run.info.run_id
        return str(run.info.run_id)

    def log_figures(self, metrics: Mapping[str, float], tags: Mapping[str, str]) -> None:
        """Figures and tags of the whole search, on the parent run."""
        with _quiet(), _one_line("the tracking store"):
            mlflow = _import_mlflow()
            now = int(time.time() * 1000)
            self._client.log_batch(
                self.run_id,
                metrics=[mlflow.entities.Metric(key, float(value), now, 0) for key, value in metrics.items()],
                tags=[mlflow.entities.RunTag(key, value) for key, value in tags.items()],
            )

    def log_artifact(self, path: Path) -> None:
        """A file of the whole search, on the parent run."""
        with _quiet(), _one_line("the tracking store"):
            self._client.log_artifact(self.run_id, str(path))

    def close(self, status: str) -> None:
        """End the parent run: FINISHED, FAILED or KILLED."""
        with _quiet(), _one_line("the tracking store"):
            self._client.set_terminated(self.run_id, status=status)


def ui_command(tracking_uri: str) -> str:
    """The command that opens MLflow on this store."""
    if tracking_uri.startswith("http"):
        return f"open {tracking_uri}"
    return f"mlflow ui --backend-store-uri {tracking_uri}"


def _trial_tags(record: TrialRecord, parent: str) -> dict[str, str]:
    tags = {PARENT_TAG: parent, STUDY_TAG: record.study, TRIAL_TAG: str(record.number), STATE_TAG: record.state.value}
    if record.reason:
        tags["reason"] = record.reason
    if record.repeat_of is not None:
        tags["repeat_of"] = str(record.repeat_of)
    return tags


def _experiment_id(client: Any, name: str, tracking_uri: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is None:
        return str(client.create_experiment(name, artifact_location=_artifact_location(tracking_uri)))
    if found.lifecycle_stage == "deleted":
        raise TrackingError(
            f"the MLflow experiment {name!r} has been deleted there: restore it, or choose another --experiment"
        )
    return str(found.experiment_id)


def _artifact_location(tracking_uri: str) -> str | None:
    """Beside the database file; MLflow's own default is a folder in the current directory, wherever the database is."""
    if not tracking_uri.startswith("sqlite:///"):
        return None
    return (Path(tracking_uri.removeprefix("sqlite:///")).resolve().parent / "mlartifacts").as_uri()


def _reopen(client: Any, run_id: str, experiment_id: str) -> Any:
    """The run of an earlier search, set running again; None if this store does not have it (any more)."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException:
        return None
    if run.info.lifecycle_stage == "deleted" or run.info.experiment_id != experiment_id:
        return None
    client.update_run(run_id, status="RUNNING")
    return run


def _logged_trials(client: Any, experiment_id: str, run_id: str) -> dict[tuple[str, str], str]:
    nested: dict[tuple[str, str], str] = {}
    token = None
    while True:
        page = client.search_runs(
            [experiment_id], f"tags.`{PARENT_TAG}` = '{run_id}'", max_results=1000, page_token=token
        )
        nested |= {
            (run.data.tags.get(STUDY_TAG, ""), run.data.tags.get(TRIAL_TAG, "")): run.info.run_id for run in page
        }
        token = page.token
        if not token:
            return nested


def _log_dataset(mlflow: Any, client: Any, run_id: str, dataset: DatasetInput) -> None:
    entity = mlflow.entities.Dataset(
        name=dataset.name, digest=dataset.fingerprint[:36], source_type="sdtune", source=dataset.source
    )
    client.log_inputs(run_id, datasets=[mlflow.entities.DatasetInput(dataset=entity, tags=[])])


def _param(mlflow: Any, key: str, value: Any) -> Any:
    text = str(value)
    return mlflow.entities.Param(key, text if len(text) <= LONGEST_PARAM else text[: LONGEST_PARAM - 1] + "…")


def _import_mlflow() -> Any:
    # Read once, at import: usage statistics would be sent from a tool that has no business on the network.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    return mlflow


@contextmanager
def _one_line(where: str) -> Iterator[None]:
    """Failures of the store as one line."""
    import sqlalchemy.exc
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, sqlalchemy.exc.SQLAlchemyError, OSError) as cause:
        reason = (str(getattr(cause, "orig", None) or cause).strip().splitlines() or [type(cause).__name__])[0]
        raise TrackingError(f"cannot use the MLflow store {where}: {reason}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """No notes of MLflow and of its database migrations, nor its libraries' warnings to it; all is put back as it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _import_mlflow()
        with _log_levels(logging.CRITICAL):
            yield


@contextmanager
def _log_levels(level: int) -> Iterator[None]:
    loggers = [
        logging.getLogger(name) for name in ("mlflow", "mlflow.store.db.utils", "alembic", "alembic.runtime.migration")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
