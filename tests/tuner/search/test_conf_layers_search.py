"""ConfLayers under Optuna, from the command to the records: parameters in Optuna, MLflow and on the screen, and resuming."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest

from tests.support.benches import charge, per_token
from tests.support.commands import SearchCommand
from tests.support.stored_trials import stored_trials

PARAMETERS = {"confidence", "lambda_start", "lambda_step", "window", "skip_ratio", "top_probability.threshold"}


@pytest.fixture
def rigged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charge plain decoding three times as much as drafts, so that a draft wins on a model too small to gain from one."""
    charge(monkeypatch, per_token(plain=3.0, drafted=1.0))


@pytest.mark.usefixtures("rigged")
def test_tuned_parameters_are_recorded_shown_and_resumed(run_search: SearchCommand, workplace: Path) -> None:
    assert run_search(study="conf_layers_tuned", trials="2").exit_code == 0
    result = run_search(study="conf_layers_tuned", trials="5")
    assert result.exit_code == 0, result.output
    assert "conf_layers_tuned: 2 finished trials found" in result.stderr
    assert "best trial " in result.stderr
    assert "chain only" in result.stderr
    stored = stored_trials(workplace / "sdtune.db", "tiny/conf_layers_tuned")
    trials = [trial for trial in stored if "record" in trial.user_attrs]  # starts that never ran are closed
    assert len(trials) == 5
    assert all(set(trial.params) >= PARAMETERS for trial in trials)
    first = trials[0].params
    assert (first["lambda_start"], first["skip_ratio"]) == (0.0, 0.45), "the published settings"
    assert first["window"] == 10, "cut to the continuations"
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{workplace.parent / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    nested = {run.data.params["trial"]: run.data.params for run in runs if "mlflow.parentRunId" in run.data.tags}
    assert len(nested) == 5
    for trial in trials:
        noted = nested[str(trial.number)]
        assert noted["note.confidence"] == trial.params["confidence"]
        assert float(noted["note.lambda_start"]) == pytest.approx(trial.params["lambda_start"], abs=1e-4)
        assert int(noted["note.window"]) == trial.params["window"]


def test_changed_settings_are_another_search(run_search: SearchCommand, workplace: Path) -> None:
    assert run_search(study="conf_layers", trials="1").exit_code == 0
    changed = workplace.parent / "changed.yaml"
    small = (workplace.parent / "small.yaml").read_text()
    changed.write_text(small + "studies: {conf_layers: {form: unrounded}}\n")
    result = run_search(study="conf_layers", trials="1", config=str(changed))
    assert result.exit_code == 2
    assert "was a search with another space" in result.stderr
