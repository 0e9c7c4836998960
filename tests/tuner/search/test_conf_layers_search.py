"""ConfLayers under Optuna, from the command to the records: parameters in Optuna, MLflow and on the screen."""

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
def test_tuned_parameters_are_recorded_and_shown(run_search: SearchCommand, workplace: Path) -> None:
    result = run_search(study="conf_layers_tuned", trials="4")
    assert result.exit_code == 0, result.output
    assert "best trial " in result.stderr
    assert "chain only" in result.stderr
    stored = stored_trials(workplace / "sdtune.db", "tiny/conf_layers_tuned")
    trials = [trial for trial in stored if "record" in trial.user_attrs]  # starts that never ran are closed
    assert len(trials) == 4
    assert all(set(trial.params) >= PARAMETERS for trial in trials)
    first = trials[0].params
    assert (first["lambda_start"], first["skip_ratio"]) == (0.0, 0.45), "the published settings"
    assert first["window"] == 10, "cut to the continuations"
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{workplace.parent / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    nested = {run.data.params["trial"]: run.data.params for run in runs if "mlflow.parentRunId" in run.data.tags}
    assert len(nested) == 4
    for trial in trials:
        noted = nested[str(trial.number)]
        assert noted["note.confidence"] == trial.params["confidence"]
        assert float(noted["note.lambda_start"]) == pytest.approx(trial.params["lambda_start"], abs=1e-4)
        assert int(noted["note.window"]) == trial.params["window"]
