"""MLflow, and the only file that imports it: a run per search with a nested one per trial, a run per distillation, all through
an explicit client.

Nothing global is touched: no active run, no default tracking URI, no environment variable or log level that is not put
back. MLflow takes seconds to import, so that waits until a tracker is opened.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.contract import TrialRecord, TrialState
from tuner.errors import TrackingError
from tuner.trial_columns import trial_metrics, trial_params

PARENT_TAG = "mlflow.parentRunId"
KIND_TAG, IDENTITY_TAG = "sdtune", "sdtune.identity"
STUDY_TAG, TRIAL_TAG, STATE_TAG = "sdtune.study", "sdtune.trial", "state"
LONGEST_PARAM = 250
"""Characters of a parameter; what is longer is cut, the whole stands in the artefact `candidate.yaml`."""
MOST_METRICS = 1000
"""Values that a store takes at once."""

QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
"""No usage statistics (asked for at import and again at each call), and no address of a server's run printed at its end."""

STATUS = {TrialState.COMPLETE: "FINISHED", TrialState.PRUNED: "KILLED", TrialState.FAIL: "FAILED"}


TrialKey = tuple[str, str]
"""Study and number of a trial, as its tags hold them."""


@dataclass(frozen=True)
class DatasetInput:
    """The data of a search, as MLflow shows it."""

    name: str
    fingerprint: str
    source: str


class Tracker:
    """The runs of one search, or the one of a distillation. `TrackingError`, in one line, if the store cannot be used."""

    def __init__(self, client: Any, experiment_id: str, run_id: str, nested: Mapping[TrialKey, Any]) -> None:
        self._client = client
        self._experiment_id = experiment_id
        self.run_id = run_id
        ids = {key: str(run.info.run_id) for key, run in nested.items()}
        # A run that was never ended is a trial whose logging was cut short by a kill: it is gone on with, not skipped.
        self._begun = {key: ids[key] for key, run in nested.items() if run.info.status == "RUNNING"}
        self._logged = {key: ids[key] for key in ids.keys() - self._begun.keys()}

    @classmethod
    def open(
        cls,
        tracking_uri: str,
        experiment: str,
        *,
        run_id: str | None,
        params: Mapping[str, str | int | float | bool | None],
        dataset: DatasetInput,
        kind: str = "search",
        identity: str | None = None,
    ) -> Tracker:
        """Begin a run in `experiment`, or go on in the run `run_id` of an earlier search if it is still there.

        With an `identity` it is the latest unfinished run that bears it which is gone on with.
        """
        with _store(tracking_uri) as mlflow:
            client = mlflow.MlflowClient(tracking_uri=tracking_uri)
            # MLflow tries a server for four minutes; whether there is one at all shows at once.
            with _unless_set(MLFLOW_HTTP_REQUEST_MAX_RETRIES="1", MLFLOW_HTTP_REQUEST_TIMEOUT="20"):
                experiment_id = _experiment_id(client, experiment, tracking_uri)
            if identity is not None:
                run_id = _unfinished(client, experiment_id, identity)
            run = _reopen(client, run_id, experiment_id) if run_id else None
            if run is None:
                name = experiment if kind == "search" else f"{experiment}-{kind}"
                tags = {KIND_TAG: kind} | ({} if identity is None else {IDENTITY_TAG: identity})
                run = client.create_run(experiment_id, run_name=name, tags=tags)
                _log_dataset(mlflow, client, run.info.run_id, dataset)
            known = run.data.params
            fresh = {key: value for key, value in params.items() if key not in known and value is not None}
            client.log_batch(run.info.run_id, params=[_param(mlflow, key, value) for key, value in fresh.items()])
            return cls(client, experiment_id, run.info.run_id, _nested_runs(client, experiment_id, run.info.run_id))

    def log_trial(self, record: TrialRecord) -> str:
        """Log a trial as a nested run and return its id; a trial that is there already is left as it is."""
        trial = (record.study, str(record.number))
        if trial in self._logged:
            return self._logged[trial]
        with _store(self._uri) as mlflow:
            run_id = self._begun.get(trial) or self._begin(record)
            metrics = _metrics(mlflow, trial_metrics(record))
            params = [_param(mlflow, key, value) for key, value in trial_params(record).items()]
            self._client.log_batch(run_id, metrics=metrics, params=params)
            self._client.log_dict(run_id, record.candidate.model_dump(mode="json"), "candidate.yaml")
            self._client.set_terminated(run_id, status=STATUS[record.state])
        self._logged[trial] = run_id
        return run_id

    def _begin(self, record: TrialRecord) -> str:
        """A nested run that started when the trial did, so that MLflow's duration is the trial's and not the logging's."""
        run = self._client.create_run(
            self._experiment_id,
            start_time=_now() - int(record.seconds * 1000),
            run_name=f"{record.study}/{record.number}",
            tags=_trial_tags(record, self.run_id),
        )
        return str(run.info.run_id)

    @property
    def _uri(self) -> str:
        return str(self._client.tracking_uri)

    def log_figures(self, metrics: Mapping[str, float], tags: Mapping[str, str]) -> None:
        """Figures and tags of the whole search, on the parent run."""
        with _store(self._uri) as mlflow:
            self._client.log_batch(
                self.run_id,
                metrics=_metrics(mlflow, metrics),
                tags=[mlflow.entities.RunTag(key, value) for key, value in tags.items()],
            )

    def log_history(self, history: Mapping[int, Mapping[str, float]]) -> None:
        """Figures of many steps at once, by the step's number, on the parent run."""
        with _store(self._uri) as mlflow:
            metrics = [metric for step, figures in history.items() for metric in _metrics(mlflow, figures, step)]
            for first in range(0, len(metrics), MOST_METRICS):
                self._client.log_batch(self.run_id, metrics=metrics[first : first + MOST_METRICS])

    def log_document(self, document: Mapping[str, Any], name: str) -> None:
        """Plain data as the file `name` (its ending says in which form), on the parent run."""
        with _store(self._uri):
            self._client.log_dict(self.run_id, dict(document), name)

    def log_artifact(self, path: Path) -> None:
        """A file of the whole search, on the parent run."""
        with _store(self._uri):
            self._client.log_artifact(self.run_id, str(path))

    def close(self, status: str) -> None:
        """End the parent run: FINISHED, FAILED or KILLED."""
        with _store(self._uri):
            self._client.set_terminated(self.run_id, status=status)


def ui_command(tracking_uri: str) -> str:
    """The command that opens MLflow on this store."""
    if tracking_uri.startswith("http"):
        return f"open {tracking_uri}"
    return f"mlflow ui --backend-store-uri {shlex.quote(tracking_uri)}"


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
    except MlflowException as cause:
        if cause.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    if run.info.lifecycle_stage == "deleted" or run.info.experiment_id != experiment_id:
        return None
    client.update_run(run_id, status="RUNNING")
    return run


def _unfinished(client: Any, experiment_id: str, identity: str) -> str | None:
    """The latest run of this identity that was stopped, killed or failed."""
    wanted = f"tags.`{IDENTITY_TAG}` = '{identity}' and attributes.status != 'FINISHED'"
    found = client.search_runs([experiment_id], wanted, max_results=1, order_by=["attributes.start_time DESC"])
    return str(found[0].info.run_id) if found else None


def _nested_runs(client: Any, experiment_id: str, run_id: str) -> dict[TrialKey, Any]:
    nested: dict[TrialKey, Any] = {}
    token = None
    while True:
        page = client.search_runs(
            [experiment_id], f"tags.`{PARENT_TAG}` = '{run_id}'", max_results=1000, page_token=token
        )
        nested |= {(run.data.tags.get(STUDY_TAG, ""), run.data.tags.get(TRIAL_TAG, "")): run for run in page}
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


def _metrics(mlflow: Any, values: Mapping[str, float], step: int = 0) -> list[Any]:
    now = _now()
    return [mlflow.entities.Metric(key, float(value), now, step) for key, value in values.items()]


def _now() -> int:
    """Milliseconds, MLflow's clock."""
    return int(time.time() * 1000)


@contextmanager
def _store(tracking_uri: str) -> Iterator[Any]:
    """MLflow, silent and off the network but for its store, whose failures come as one line; all is put back as it was."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # those of MLflow's libraries to MLflow
        stack.enter_context(_unless_set(**QUIET))
        import mlflow

        stack.enter_context(_log_levels(logging.CRITICAL))
        stack.enter_context(_one_line(tracking_uri))
        yield mlflow


@contextmanager
def _one_line(tracking_uri: str) -> Iterator[None]:
    """Failures of the store as one line, without the password that its address may hold."""
    import sqlalchemy.exc
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, sqlalchemy.exc.SQLAlchemyError, OSError, ImportError) as cause:
        reason = (str(getattr(cause, "orig", None) or cause).strip().splitlines() or [type(cause).__name__])[0]
        message = f"cannot use the MLflow store {tracking_uri}: {reason}"
        raise TrackingError(re.sub(r"(://[^/@\s:]*):[^/@\s]+@", r"\1:***@", message)) from None


@contextmanager
def _unless_set(**variables: str) -> Iterator[None]:
    """Environment variables for a while; what the user has set stands."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


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
