"""MLflow tracking of searches, with a nested run per trial, and of distillations.

Only this module of the tuner imports MLflow. It uses an explicit client, sets no active run and no default tracking URI, and
restores environment variables and log levels. MLflow takes seconds to import, so the import waits until a tracker is opened.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from decoding.errors import first_line
from studies.contract import TrialRecord, TrialState
from tuner.databases import make_private, refuse_unusable_database
from tuner.errors import TrackingError, TrackingOutageError, without_password
from tuner.review.markdown import EXPERIMENT_NOTE, WON, trial_note, trial_run_name
from tuner.review.tables import trial_metrics, trial_params

VIEW_KEY = "sdtune"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW_KEY}"
VIEW = {
    "searchFilter": "metrics.speedup > 0",  # searches: the speed-up of a trial is `tuning_speedup`
    "orderByKey": "metrics.`speedup`",
    "orderByAsc": False,
    "startTime": "ALL",
    "lifecycleFilter": "Active",
    "datasetsFilter": [],
    "modelVersionFilter": "All Runs",
    "selectedColumns": [
        *("metrics.`speedup`", "metrics.`speedup_low`", "metrics.`end_to_end_speedup`"),
        *("tags.`verdict`", "tags.`winner`"),
    ],
}
"""The table of searches in MLflow's own page, as its shared views are stored (seen in MLflow 3.17)."""
LOCKED = "database is locked"
LOCK_SECONDS = 60.0
"""Seconds for which a call is made again, as long as the storage of the trials waits."""
PAUSE_SECONDS = 0.1


class PatientClient:
    """The client that it is given, whose calls wait while another process locks the store's SQLite file.

    MLflow waits for twenty seconds. The call that it then gives up has changed nothing, so that it may be made again.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return partial(self._call, found) if callable(found) else found

    def _call(self, method: Callable[..., Any], *given: Any, **named: Any) -> Any:
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                return method(*given, **named)
            # Whatever the client raises for it: only the words of SQLite are the same.
            except Exception as cause:
                if LOCKED not in str(cause) or time.monotonic() >= end:
                    raise
            time.sleep(PAUSE_SECONDS)


PARENT_TAG = "mlflow.parentRunId"
KIND_TAG, IDENTITY_TAG = "sdtune", "sdtune.identity"
STUDY_TAG, TRIAL_TAG, STATE_TAG = "sdtune.study", "sdtune.trial", "state"
MAX_PARAM_LENGTH = 250
"""Maximum length of a parameter in characters; longer ones are cut. The artefact `candidate.yaml` has them in full."""
MAX_METRICS = 1000
"""Maximum number of metric values per call."""

QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Settings against usage statistics (sent at import and at each call), printed run URLs and progress bars."""
PATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""Limits of a call to a server: by default MLflow waits for a server that does not answer for a quarter of an hour."""
BRIEF = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
"""Limits of the first calls: an absent server shows at the first attempt."""

STATUS = {TrialState.COMPLETE: "FINISHED", TrialState.PRUNED: "FINISHED", TrialState.FAIL: "FAILED"}
"""Status of a trial's run. A pruned trial is not marked as killed, which looks like a failure: its name and a tag say it."""

NOTE_TAG = "mlflow.note.content"
"""MLflow's tag of a description, in Markdown, of a run or an experiment."""
SOURCE_TAG = "mlflow.source.name"
"""MLflow's tag of what made a run, a column of its table of runs."""
WINNER_TAG = "sdtune.winner"
UI_ADDRESS = "http://127.0.0.1:5000"
"""Where `mlflow ui` answers unless it is told otherwise."""
AWAY = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE")
"""MLflow's codes of a store that does not answer, or that fails by itself."""

TrialKey = tuple[str, str]
"""Study and number of a trial, as in its tags."""


@dataclass(frozen=True)
class DatasetInput:
    name: str
    fingerprint: str
    source: str


class Tracker:
    """MLflow runs of one search, or the run of one distillation.

    All methods raise `TrackingError` if the store cannot be used.
    """

    def __init__(self, client: Any, experiment_id: str, run_id: str, nested: Mapping[TrialKey, Any]) -> None:
        self._client = client
        self._experiment_id = experiment_id
        self.run_id = run_id
        self._logged = _ended(nested)

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
        """Resume the run `run_id` if it exists, or begin one in `experiment`.

        With an `identity` and no `run_id`, the latest unfinished run tagged with it is resumed.
        """
        refuse_unusable_database(tracking_uri, what="the MLflow store", tables=("experiments",), error=TrackingError)
        with opened_store(tracking_uri, limits=BRIEF) as mlflow:
            client = PatientClient(mlflow.MlflowClient(tracking_uri=tracking_uri))
            experiment_id = experiment_named(client, experiment, tracking_uri)
            if NOTE_TAG not in client.get_experiment(experiment_id).tags:  # a description by the user stays
                client.set_experiment_tag(experiment_id, VIEW_TAG, json.dumps(VIEW))
                page = searches_address(page_address("", experiment_id, "")).partition("/#")[2]
                note = f"[**All searches, with speed-up and verdict**](#{page}). {EXPERIMENT_NOTE}"
                client.set_experiment_tag(experiment_id, NOTE_TAG, note)
            if identity is not None and run_id is None:
                run_id = _unfinished(client, experiment_id, identity)
            run = _reopen(client, run_id, experiment_id) if run_id else None
            if run is None:
                name = experiment if kind == "search" else f"{experiment}-{kind}"
                tags = {KIND_TAG: kind, SOURCE_TAG: f"sdtune {kind}"} | (
                    {} if identity is None else {IDENTITY_TAG: identity}
                )
                run = client.create_run(experiment_id, run_name=name, tags=tags)
                _log_dataset(mlflow, client, run.info.run_id, dataset)
            known = run.data.params
            fresh = {key: value for key, value in params.items() if key not in known and value is not None}
            client.log_batch(run.info.run_id, params=[_param(mlflow, key, value) for key, value in fresh.items()])
            return cls(client, experiment_id, run.info.run_id, _nested_runs(client, experiment_id, run.info.run_id))

    def log_trial(self, record: TrialRecord) -> str:
        """Log a trial as a nested run, once, and return the run id; to be called under a lock where several processes log."""
        trial = (record.study, str(record.number))
        if trial in self._logged:
            return self._logged[trial]
        with opened_store(self.tracking_uri) as mlflow:
            # Another process may have logged it: it takes one that was silent for long for dead.
            found = _nested_runs(self._client, self._experiment_id, self.run_id, trial)
            self._logged |= _ended(found)
            if trial in self._logged:
                return self._logged[trial]
            # A run that is still running belongs to a trial whose logging was killed: it is completed.
            run_id = str(found[trial].info.run_id) if trial in found else self._begin(record)
            metrics = _metrics(mlflow, trial_metrics(record))
            params = [_param(mlflow, key, value) for key, value in trial_params(record).items()]
            self._client.log_batch(run_id, metrics=metrics, params=params)
            self._client.log_dict(run_id, record.candidate.model_dump(mode="json"), "candidate.yaml")
            self._client.set_terminated(run_id, status=STATUS[record.state])
        self._logged[trial] = run_id
        return run_id

    def log_missing(self, records: Iterable[TrialRecord]) -> None:
        """Log the trials that have no run yet, whichever process made them; to be called under a lock, as `log_trial`."""
        with opened_store(self.tracking_uri):
            self._logged |= _ended(_nested_runs(self._client, self._experiment_id, self.run_id))
        for record in records:
            self.log_trial(record)

    def _begin(self, record: TrialRecord) -> str:
        run = self._client.create_run(
            self._experiment_id,
            start_time=_now() - int(record.seconds * 1000),
            run_name=trial_run_name(record),
            tags={**_trial_tags(record, self.run_id), NOTE_TAG: trial_note(record)},
        )
        return str(run.info.run_id)

    @property
    def tracking_uri(self) -> str:
        return str(self._client.tracking_uri)

    @property
    def address(self) -> str:
        return page_address(self.tracking_uri, self._experiment_id, self.run_id)

    def describe(self, note: str) -> None:
        with opened_store(self.tracking_uri):
            self._client.set_tag(self.run_id, NOTE_TAG, note)

    def name_winner(self, record: TrialRecord) -> None:
        """Tag the winning trial, say so in its name, and tag the parent run with its id."""
        with opened_store(self.tracking_uri):
            winner = self._logged[record.study, str(record.number)]
            earlier = self._client.get_run(self.run_id).data.tags.get(WINNER_TAG)
            if earlier not in (None, winner):
                self._client.delete_tag(earlier, WINNER_TAG)  # of a search that was resumed
                name = self._client.get_run(earlier).info.run_name
                self._client.update_run(earlier, name=name.removeprefix(WON))
            self._client.set_tag(winner, WINNER_TAG, "true")
            self._client.update_run(winner, name=trial_run_name(record, won=True))
            self._client.set_tag(self.run_id, WINNER_TAG, winner)

    def log_figures(self, metrics: Mapping[str, float], tags: Mapping[str, str]) -> None:
        with opened_store(self.tracking_uri) as mlflow:
            self._client.log_batch(
                self.run_id,
                metrics=_metrics(mlflow, metrics),
                tags=[mlflow.entities.RunTag(key, value) for key, value in tags.items()],
            )

    def log_history(self, history: Mapping[int, Mapping[str, float]]) -> None:
        """Log figures of many steps to the parent run, by step number."""
        with opened_store(self.tracking_uri) as mlflow:
            metrics = [metric for step, figures in history.items() for metric in _metrics(mlflow, figures, step)]
            for first in range(0, len(metrics), MAX_METRICS):
                self._client.log_batch(self.run_id, metrics=metrics[first : first + MAX_METRICS])

    def log_document(self, document: Mapping[str, Any], name: str) -> None:
        """Log plain data as a file; the suffix of `name` sets the format."""
        with opened_store(self.tracking_uri):
            self._client.log_dict(self.run_id, dict(document), name)

    def log_text(self, text: str, name: str) -> None:
        with opened_store(self.tracking_uri):
            self._client.log_text(self.run_id, text, name)

    def log_artifact(self, path: Path) -> None:
        with opened_store(self.tracking_uri):
            self._client.log_artifact(self.run_id, str(path))

    def close(self, status: str) -> None:
        """End the parent run: FINISHED, FAILED or KILLED."""
        with opened_store(self.tracking_uri):
            self._client.set_terminated(self.run_id, status=status)


def check_store(tracking_uri: str) -> None:
    """Raise `TrackingError` for a SQLite file that cannot be used, or a server that does not answer; writes nothing."""
    refuse_unusable_database(tracking_uri, what="the MLflow store", tables=("experiments",), error=TrackingError)
    if tracking_uri.startswith("http"):
        with opened_store(tracking_uri, limits=BRIEF) as mlflow:
            mlflow.MlflowClient(tracking_uri=tracking_uri).search_experiments(max_results=1)


def read_artifact(tracking_uri: str, run_id: str, name: str) -> str | None:
    """Return the text of a run's artifact, or None if the store has no such run or artifact."""
    with opened_store(tracking_uri) as mlflow:
        client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        try:
            known = {each.path for each in client.list_artifacts(run_id)}
        except mlflow.exceptions.MlflowException as cause:
            if cause.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        if name not in known:
            return None
        with TemporaryDirectory() as folder:
            return Path(client.download_artifacts(run_id, name, folder)).read_text(encoding="utf-8")


def page_address(tracking_uri: str, experiment_id: str, run_id: str) -> str:
    """Return the address of a run's page in the MLflow UI, without the password of the store.

    Without `workflowType` MLflow 3 opens a page about traces, which has no runs.
    """
    base = without_password(tracking_uri).rstrip("/") if tracking_uri.startswith("http") else UI_ADDRESS
    return f"{base}/#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"


def searches_address(address: str) -> str:
    """Return the page that lists the searches beside the one at `address`: speed-ups and verdicts are columns."""
    return f"{address.partition('/runs/')[0]}/runs?viewStateShareKey={VIEW_KEY}&workflowType=machine_learning"


def ui_command(tracking_uri: str) -> str:
    tracking_uri = without_password(tracking_uri)
    if tracking_uri.startswith("http"):
        return f"open {tracking_uri}"
    return f"mlflow ui --backend-store-uri {shlex.quote(tracking_uri)}"


def ui_lines(tracking_uri: str, address: str) -> str:
    """Return what to do to open a page of the MLflow UI on this store."""
    return address if tracking_uri.startswith("http") else f"{ui_command(tracking_uri)}   then {address}"


def _trial_tags(record: TrialRecord, parent: str) -> dict[str, str]:
    tags = {PARENT_TAG: parent, STUDY_TAG: record.study, TRIAL_TAG: str(record.number), STATE_TAG: record.state.value}
    if record.reason:
        tags["reason"] = record.reason
    if record.repeat_of is not None:
        tags["repeat_of"] = str(record.repeat_of)
    return tags


def experiment_named(client: Any, name: str, tracking_uri: str) -> str:
    """Return the id of an experiment, which is made if the store lacks it."""
    found = client.get_experiment_by_name(name)
    if found is None:
        return str(client.create_experiment(name, artifact_location=_artifact_location(tracking_uri)))
    if found.lifecycle_stage == "deleted":
        raise TrackingError(
            f"the MLflow experiment {name!r} has been deleted: restore it, or choose another --experiment"
        )
    return str(found.experiment_id)


def _artifact_location(tracking_uri: str) -> str | None:
    """Return a folder beside the database file; MLflow's default is the working directory."""
    if not tracking_uri.startswith("sqlite:///"):
        return None
    return (Path(tracking_uri.removeprefix("sqlite:///")).resolve().parent / "mlartifacts").as_uri()


def _reopen(client: Any, run_id: str, experiment_id: str) -> Any:
    """Return an earlier run, set running; None if the store lacks it."""
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
    """Return the latest stopped, killed or failed run with this identity."""
    wanted = f"tags.`{IDENTITY_TAG}` = '{identity}' and attributes.status != 'FINISHED'"
    found = client.search_runs([experiment_id], wanted, max_results=1, order_by=["attributes.start_time DESC"])
    return str(found[0].info.run_id) if found else None


def _ended(nested: Mapping[TrialKey, Any]) -> dict[TrialKey, str]:
    return {key: str(run.info.run_id) for key, run in nested.items() if run.info.status != "RUNNING"}


def _nested_runs(client: Any, experiment_id: str, run_id: str, trial: TrialKey | None = None) -> dict[TrialKey, Any]:
    """Return the runs of all trials, or of one."""
    wanted = {PARENT_TAG: run_id} | ({} if trial is None else dict(zip((STUDY_TAG, TRIAL_TAG), trial, strict=True)))
    query = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in wanted.items())
    nested: dict[TrialKey, Any] = {}
    token = None
    while True:
        page = client.search_runs([experiment_id], query, max_results=1000, page_token=token)
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
    return mlflow.entities.Param(key, text if len(text) <= MAX_PARAM_LENGTH else text[: MAX_PARAM_LENGTH - 1] + "…")


def _metrics(mlflow: Any, values: Mapping[str, float], step: int = 0) -> list[Any]:
    now = _now()
    return [mlflow.entities.Metric(key, float(value), now, step) for key, value in values.items()]


def _now() -> int:
    return int(time.time() * 1000)


@contextmanager
def opened_store(tracking_uri: str, *, limits: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Yield MLflow, silent and without network access except to its store.

    `limits` are those of calls to a server, unless the user has set some. All settings are restored on exit.
    Failures of the store become one-line errors.
    """
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # MLflow triggers deprecation warnings of its own libraries
        stack.enter_context(_unless_set(**QUIET, **(PATIENT if limits is None else limits)))
        import mlflow

        stack.enter_context(_log_levels(logging.CRITICAL))
        stack.enter_context(_one_line(tracking_uri))
        make_private(tracking_uri)
        yield mlflow


@contextmanager
def _one_line(tracking_uri: str) -> Iterator[None]:
    """Turn failures of the store into one-line errors, without the password in its address."""
    import sqlalchemy.exc
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, sqlalchemy.exc.SQLAlchemyError, OSError, ImportError) as cause:
        # MLflow's own message may begin with advice of SQLAlchemy to programmers.
        reason = first_line(getattr(cause, "orig", None) or getattr(cause.__cause__, "orig", None) or cause)
        is_permanent = isinstance(cause, ImportError) or getattr(cause, "error_code", AWAY[0]) not in AWAY
        kind = TrackingError if is_permanent else TrackingOutageError
        raise kind(without_password(f"cannot use the MLflow store {tracking_uri}: {reason}")) from None


@contextmanager
def _unless_set(**variables: str) -> Iterator[None]:
    """Set environment variables temporarily; keep those that the user has set."""
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
