"""MLflow runs of a tracker, read back through MLflow's own client."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest

from benchmarks.faults import read_only
from decoding.draft_length import AdaEdl
from studies.contract import TrialState
from tests.support.records import candidate, measurement, record
from tuner.errors import TrackingError
from tuner.tracking import BRIEF, PATIENT, DatasetInput, Tracker, opened_store, page_address, ui_command, ui_lines

DATASET = DatasetInput("prompts.jsonl", "f" * 64, "prompts.jsonl")
Open = Callable[..., Tracker]


@pytest.fixture
def open_tracker(workplace: Path) -> Open:
    def open_(run_id: str | None = None, **params: Any) -> Tracker:
        uri = f"sqlite:///{workplace.parent / 'mlflow.db'}"
        return Tracker.open(uri, "tiny", run_id=run_id, params=params, dataset=DATASET)

    return open_


@pytest.fixture
def client(workplace: Path) -> Any:
    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{workplace.parent / 'mlflow.db'}")


def _nested(client: Any, tracker: Tracker) -> list[Any]:
    run = client.get_run(tracker.run_id)
    return list(client.search_runs([run.info.experiment_id], f"tags.`mlflow.parentRunId` = '{tracker.run_id}'"))


def test_a_trial_is_a_nested_run_with_all_its_columns(open_tracker: Open, client: Any) -> None:
    tracker = open_tracker()
    made = record(
        1.25,
        number=7,
        candidate=candidate((2, 3, 4, 9), AdaEdl(gamma=0.3)),
        measurement=measurement([1.2, 1.3]),
        notes={"lambda": -0.05, "confidence": "sublayer_entropy"},
        seconds=42.0,
    )
    tracker.log_trial(made)
    (run,) = _nested(client, tracker)
    assert run.info.run_name.startswith("conf_layers/7: skip layers 2-4,9; AdaEDL")
    assert "skip layers 2-4,9" in run.data.tags["mlflow.note.content"]
    assert run.info.status == "FINISHED"
    assert run.info.end_time - run.info.start_time >= 42_000
    assert run.data.params["skip_mlp"] == "2-4,9"
    assert run.data.params["rule.gamma"] == "0.3"
    assert run.data.params["note.lambda"] == "-0.05"
    assert run.data.metrics["tuning_speedup"] == pytest.approx(1.25)
    assert run.data.metrics["exact"] == 1.0
    assert run.data.metrics["prompts"] == 2
    assert [artefact.path for artefact in client.list_artifacts(run.info.run_id)] == ["candidate.yaml"]


@pytest.mark.parametrize(
    ("state", "status"),
    [(TrialState.COMPLETE, "FINISHED"), (TrialState.PRUNED, "FINISHED"), (TrialState.FAIL, "FAILED")],
)
def test_the_status_of_a_run_is_the_state_of_its_trial(
    open_tracker: Open, client: Any, state: TrialState, status: str
) -> None:
    tracker = open_tracker()
    tracker.log_trial(record(1.1, state=state, reason="why"))
    (run,) = _nested(client, tracker)
    assert run.info.status == status
    assert run.data.tags["state"] == state.value
    assert run.data.tags["reason"] == "why"
    assert f"({state.value.lower()})".replace("fail)", "failed)") in run.info.run_name or state is TrialState.COMPLETE


def test_a_resumed_search_keeps_its_run_and_logs_no_trial_twice(open_tracker: Open, client: Any) -> None:
    first = open_tracker(seed=1, trials=5)
    first.log_trial(record(number=0))
    first.close("KILLED")
    second = open_tracker(run_id=first.run_id, seed=1, trials=9)
    assert second.run_id == first.run_id
    second.log_trial(record(number=0))
    second.log_trial(record(number=1))
    assert len(_nested(client, second)) == 2
    run = client.get_run(first.run_id)
    assert run.info.status == "RUNNING"
    assert run.data.params == {"seed": "1", "trials": "5"}  # MLflow parameters are immutable: the first values stay


def test_a_trial_that_another_process_logged_meanwhile_has_one_run(open_tracker: Open, client: Any) -> None:
    silent = open_tracker()
    ending = open_tracker(run_id=silent.run_id)
    ending.log_missing([record(number=0)])  # it took the process of the trial for dead
    assert silent.log_trial(record(number=0)) == ending.log_trial(record(number=0))
    assert len(_nested(client, silent)) == 1


@pytest.mark.parametrize("cut_at", ["log_batch", "set_terminated"])
def test_interrupted_logging_of_a_trial_is_completed_on_resume(
    open_tracker: Open, client: Any, monkeypatch: pytest.MonkeyPatch, cut_at: str
) -> None:
    def kill(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    first = open_tracker()
    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, cut_at, kill)
        with pytest.raises(KeyboardInterrupt):
            first.log_trial(record(1.3, number=4))
    second = open_tracker(run_id=first.run_id)
    run_id = second.log_trial(record(1.3, number=4))
    assert second.log_trial(record(1.3, number=4)) == run_id
    (run,) = _nested(client, second)
    assert (run.info.run_id, run.info.status) == (run_id, "FINISHED")
    assert run.data.metrics["tuning_speedup"] == pytest.approx(1.3)
    assert [artefact.path for artefact in client.list_artifacts(run_id)] == ["candidate.yaml"]


def test_a_store_that_fails_on_reopening_gets_no_second_run(
    open_tracker: Open, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_tracker()

    def fail(*_: Any) -> None:
        raise mlflow.MlflowException("the store is busy")

    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "get_run", fail)
        with pytest.raises(TrackingError, match="the store is busy"):
            open_tracker(run_id=first.run_id)
    experiment = client.get_experiment_by_name("tiny").experiment_id
    assert [run.info.run_id for run in client.search_runs([experiment])] == [first.run_id]


def test_a_deleted_run_is_replaced_by_a_new_one(open_tracker: Open, client: Any) -> None:
    first = open_tracker()
    client.delete_run(first.run_id)
    assert open_tracker(run_id=first.run_id).run_id != first.run_id
    assert open_tracker(run_id="0" * 32).run_id != first.run_id


def test_figures_tags_data_and_files_are_on_the_parent(open_tracker: Open, client: Any, workplace: Path) -> None:
    tracker = open_tracker(model="m")
    tracker.log_figures({"held_out_speedup": 1.4}, {"winner": "skip 2"})
    (workplace / "profile.yaml").write_text("schema: x\n")
    tracker.log_artifact(workplace / "profile.yaml")
    tracker.close("FINISHED")
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["held_out_speedup"] == 1.4
    assert run.data.tags["winner"] == "skip 2"
    assert run.inputs.dataset_inputs[0].dataset.digest == "f" * 36
    assert [artefact.path for artefact in client.list_artifacts(tracker.run_id)] == ["profile.yaml"]
    assert [path.name for path in workplace.iterdir()] == ["profile.yaml"]  # no mlruns where the command was given


def test_the_winner_is_named_and_tagged_and_a_new_winner_takes_its_place(open_tracker: Open, client: Any) -> None:
    tracker = open_tracker()
    first, second = record(1.2, number=0), record(1.3, number=1)
    ids = [tracker.log_trial(each) for each in (first, second)]
    tracker.name_winner(first)
    tracker.name_winner(second)
    runs = [client.get_run(run_id) for run_id in ids]
    assert [run.info.run_name.startswith("winner: ") for run in runs] == [False, True]
    assert [run.data.tags.get("sdtune.winner") for run in runs] == [None, "true"]
    assert client.get_run(tracker.run_id).data.tags["sdtune.winner"] == ids[1]


def test_run_and_experiment_have_descriptions(open_tracker: Open, client: Any) -> None:
    tracker = open_tracker()
    experiment = client.get_run(tracker.run_id).info.experiment_id
    page = f"#/experiments/{experiment}/runs?viewStateShareKey=sdtune&workflowType=machine_learning"
    assert f"]({page})" in client.get_experiment(experiment).tags["mlflow.note.content"]
    view = json.loads(client.get_experiment(experiment).tags["mlflow.sharedViewState.sdtune"])
    assert {"metrics.`speedup`", "tags.`verdict`"} <= set(view["selectedColumns"])
    client.set_experiment_tag(experiment, "mlflow.note.content", "ours")
    again = open_tracker(run_id=tracker.run_id)
    again.describe("## Ship")
    assert client.get_experiment(experiment).tags["mlflow.note.content"] == "ours"
    tags = client.get_run(tracker.run_id).data.tags
    assert (tags["mlflow.note.content"], tags["mlflow.source.name"]) == ("## Ship", "sdtune search")
    assert again.address.endswith(f"/#/experiments/{experiment}/runs/{tracker.run_id}?workflowType=machine_learning")


def test_long_parameters_are_cut_but_complete_in_the_artefact(open_tracker: Open, client: Any) -> None:
    tracker = open_tracker()
    tracker.log_trial(record(candidate=candidate(tuple(range(1, 400, 2)))))
    (run,) = _nested(client, tracker)
    assert run.data.params["skip_mlp"].endswith("…")
    path = client.download_artifacts(run.info.run_id, "candidate.yaml")
    assert "399" in Path(path).read_text()


def test_a_store_that_cannot_be_written_says_so(open_tracker: Open, workplace: Path) -> None:
    tracker = open_tracker()
    with read_only(workplace.parent), pytest.raises(TrackingError, match="attempt to write a readonly database"):
        tracker.log_figures({"a": 1.0}, {"b": "c"})


def test_nothing_is_printed_and_log_levels_are_restored(
    workplace: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = logging.getLogger("mlflow").level
    uri = f"sqlite:///{workplace / 'new.db'}"
    Tracker.open(uri, "tiny", run_id=None, params={}, dataset=DATASET).log_trial(record())
    assert logging.getLogger("mlflow").level == before
    assert capfd.readouterr() == ("", "")


def test_an_invalid_store_is_a_one_line_error(workplace: Path) -> None:
    path = workplace / "mlflow.db"
    path.write_bytes(b"not a database " * 200)
    with pytest.raises(TrackingError, match="not a database") as refused:
        Tracker.open(f"sqlite:///{path}", "tiny", run_id=None, params={}, dataset=DATASET)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("address", ["http://me:secret@127.0.0.1:9", "postgresql://me:secret@127.0.0.1:9/runs"])
def test_an_unreachable_store_is_a_one_line_error_without_password(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], address: str
) -> None:
    for driver in ("psycopg", "psycopg2"):
        monkeypatch.setitem(sys.modules, driver, None)  # not installed, whatever this machine has
    with pytest.raises(TrackingError, match=r"//me:\*\*\*@127\.0\.0\.1:9") as refused:
        Tracker.open(address, "tiny", run_id=None, params={}, dataset=DATASET)
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")


def test_mlflow_is_quiet_during_a_call_only(open_tracker: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    before, seen = dict(os.environ), []
    log_batch = mlflow.MlflowClient.log_batch

    def watched(*arguments: Any, **options: Any) -> Any:
        seen.extend(os.environ.get(name) for name in names)
        return log_batch(*arguments, **options)

    tracker = open_tracker()
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", watched)
    tracker.log_trial(record())
    assert seen == ["true", "true"]
    assert dict(os.environ) == before


def test_a_deleted_experiment_is_refused_by_name(open_tracker: Open, client: Any) -> None:
    open_tracker()
    client.delete_experiment(client.get_experiment_by_name("tiny").experiment_id)
    with pytest.raises(TrackingError, match="'tiny' has been deleted"):
        open_tracker()


def test_the_command_that_opens_mlflow_names_the_store_without_its_password() -> None:
    assert ui_command("sqlite:///my runs.db") == "mlflow ui --backend-store-uri 'sqlite:///my runs.db'"
    address = page_address("https://me:secret@host:5000/", "3", "run")
    assert address == "https://me:***@host:5000/#/experiments/3/runs/run?workflowType=machine_learning"
    for uri in ("https://me:secret@host:5000", "postgresql://me:secret@host/mlflow"):
        assert "secret" not in ui_command(uri) + ui_lines(uri, page_address(uri, "3", "run"))


def test_a_server_that_never_answers_costs_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "1"}
    monkeypatch.setattr("tuner.tracking.BRIEF", limits)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and is silent
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TrackingError, match="cannot use the MLflow store http://127"):
            Tracker.open(uri, "tiny", run_id=None, params={}, dataset=DatasetInput("d", "0" * 64, "d"))


def test_calls_to_a_server_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened_store("http://127.0.0.1:9"):
        assert {name: os.environ[name] for name in PATIENT} == PATIENT
    with opened_store("http://127.0.0.1:9", limits=BRIEF):
        assert {name: os.environ[name] for name in BRIEF} == BRIEF
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    with opened_store("http://127.0.0.1:9", limits=BRIEF):
        assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
