"""Bad input: one line on stderr that says what would be right, status 2, no traceback, nothing written or lost."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from decoding.drafts import LayerSkip
from decoding.profile import DraftProfile, TargetIdentity
from tests.support.commands import SearchCommand
from tests.support.refusals import refused
from tests.support.tiny import save_tiny_checkpoint, write_tiny_prompts
from tuner.cli.main import main


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"model": "no/such-model"}, ["no such model", "no/such-model"]),
        ({"model": None}, ["which model", "--model"]),
        ({"dataset": "gsm8"}, ["no such dataset", "did you mean 'gsm8k'"]),
        ({"device": "abacus"}, ["no device 'abacus'"]),
        ({"out": "no/such/folder/profile.yaml"}, ["no/such/folder", "cannot write"]),
        ({"out": "."}, ["is a folder"]),
        ({"config": "nowhere.yaml"}, ["no such configuration"]),
        ({"storage": "sqlite:////dev/null/trials.db"}, ["cannot use the storage"]),
        ({"tracking_uri": "sqlite:////dev/null/mlflow.db"}, ["cannot use the MLflow store"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_search(
    run_search: SearchCommand, workplace: Path, flags: dict[str, str | None], words: list[str]
) -> None:
    refused(run_search(**flags), *words)
    left = [path.name for path in workplace.iterdir()]
    assert not left


def test_a_store_that_does_not_answer_is_noticed_before_the_model_is_loaded(
    run_search: SearchCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.search.task.load", None)
    monkeypatch.setattr("tuner.tracking.BRIEF", {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"})
    refused(run_search(tracking_uri="http://127.0.0.1:9"), "cannot use the MLflow store")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serch"], ["No such command 'serch'", "Did you mean one of: 'search'"]),
        (["jobs", "lst"], ["No such command 'lst'", "Did you mean 'list'"]),
        (["search", "m", "d", "--dataset", "e"], ["dataset is given twice: 'd' and --dataset 'e'"]),
        (["generate", "p.yaml"], ["Missing option '--prompt'"]),
    ],
)
def test_a_wrong_command_line(workplace: Path, arguments: list[str], words: list[str]) -> None:
    refused(CliRunner().invoke(main, arguments), *words)


def test_too_few_rows_are_refused_before_the_model_is_loaded(
    workplace: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.search.task.load", None)
    data = write_tiny_prompts(workplace / "few.jsonl", count=11)
    refused(CliRunner().invoke(main, ["search", str(checkpoint), str(data)]), "has 11 rows, and 12 are needed")
    asked = ["search", str(checkpoint), str(data), "--tuning-prompts", "8"]
    refused(CliRunner().invoke(main, asked), "32 are needed", "--tuning-prompts 6 --held-out-prompts 5")


def test_a_damaged_storage_is_left_as_it_is(run_search: SearchCommand, workplace: Path) -> None:
    path = workplace / "trials.db"
    path.write_bytes(b"not a database " * 300)
    refused(run_search(storage=f"sqlite:///{path}"), "cannot", "not a database")
    assert path.read_bytes() == b"not a database " * 300


def test_another_search_under_a_used_experiment_changes_nothing(
    run_search: SearchCommand, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_search(trials="1", study="exit_layer", experiment="used").exit_code == 0
    before = _runs(workplace.parent / "mlflow.db")
    assert [status for _, status, _ in before][:1] == ["FINISHED"]
    data = write_tiny_prompts(workplace / "other.jsonl", count=30)
    monkeypatch.setattr("tuner.search.run.plan", None)  # nothing is decoded
    refused(run_search(dataset=str(data), experiment="used"), "was a search with another data", "--experiment")
    smaller = save_tiny_checkpoint(workplace / "smaller", num_layers=5)
    monkeypatch.setattr("tuner.search.task.load", None)  # nothing is loaded
    refused(run_search(model=str(smaller), experiment="used"), "was a search with another model", "--experiment")
    assert _runs(workplace.parent / "mlflow.db") == before


def _runs(database: Path) -> list[tuple[str, str, int]]:
    """Return name, status and end of each run in MLflow."""
    with closing(sqlite3.connect(database)) as file:
        return file.execute("select name, status, end_time from runs order by start_time").fetchall()


def _profile(path: Path) -> Path:
    target = TargetIdentity(
        model="m", architecture="LlamaForCausalLM", num_layers=6, dtype="float32", config_sha256="a", weights_sha256="b"
    )
    DraftProfile(name="p", target=target, draft=LayerSkip.blocks((2, 3))).save(path)
    return path


def test_wrong_profiles(workplace: Path, checkpoint: Path) -> None:
    refused(CliRunner().invoke(main, ["show", "none.yaml"]), "no such profile: none.yaml")
    path = _profile(workplace / "p.yaml")
    result = CliRunner().invoke(main, ["generate", str(path), "--model", str(checkpoint), "--prompt", "w1"])
    refused(result, "was tuned for m", "another configuration")


def test_a_model_that_cannot_be_tuned(workplace: Path, run_search: SearchCommand) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    from tests.support.tiny import tiny_tokenizer

    config = MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2, intermediate_size=32)
    MambaForCausalLM(config).save_pretrained(workplace / "mamba")
    tiny_tokenizer().save_pretrained(workplace / "mamba")
    refused(run_search(model=str(workplace / "mamba")), "mamba keeps a recurrent state")
    doctor = CliRunner().invoke(main, ["doctor", "--model", str(workplace / "mamba")])
    assert doctor.exit_code == 1
    assert "cannot be tuned" in doctor.stdout
