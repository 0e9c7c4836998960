"""Bad input: one line on stderr that says what would be right, status 2, no traceback, nothing written or lost."""

from __future__ import annotations

import shlex
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from decoding.drafts import LayerSkip
from decoding.profile import DraftProfile, TargetIdentity
from tests.support.commands import SearchCommand
from tests.support.profiles import save_profile
from tests.support.refusals import refused
from tests.support.tiny import save_tiny_checkpoint, write_tiny_prompts
from tuner.cli.main import main

MISTAKES = """
search                                                    | which model? give --model
search model                                              | which dataset? give --dataset
serch                                                     | No such command 'serch' & Did you mean one of: 'search'
search model data.jsonl --trails 3                        | No such option '--trails' & '--trials'
search model data.jsonl --trials many                     | '--trials': 'many' is not a valid integer
search model data.jsonl --timeout 30min                   | must be a duration such as 90s, 10m or 1.5h
search model data.jsonl --timeout 1s                      | too short for this model & give --timeout 10s or more
search model data.jsonl --dtype bf16                      | Give --set dtype=VALUE
search model data.jsonl --set dtype=bf16                  | dtype & 'bfloat16'
search model data.jsonl --set device=abacus               | no device 'abacus' & try cpu
search model data.jsonl --threads 0                       | '--threads': 0 is not in the range
search model data.jsonl --study joind                     | unknown study 'joind'; did you mean 'joint'
search model data.jsonl --study optuna:TPE                | Optuna has no such sampler; valid: & TPESampler
search model data.jsonl --runner fast                     | 'fast' is not one of 'auto', 'eager', 'static'
search model data.jsonl --out no/such/p.yaml              | there is no folder no/such
search model data.jsonl --out folder                      | it is a folder; name a file such as folder/profile.yaml
search model data.jsonl --prompt-column promt             | no column 'promt'; did you mean 'prompt'
search model data.jsonl --template '{quest'               | template: & write {{ and }} for braces
search model data.jsonl --set finalist=2                  | unknown key 'finalist'; did you mean 'finalists'
search model data.jsonl --set finalists=two               | finalists: input should be a valid integer
search model data.jsonl --set finalists                   | give KEY=VALUE, such as finalists=3
search model data.jsonl --set studies.joint.max_token=3   | unknown key 'max_token'; did you mean 'max_tokens'
search model data.jsonl --set storage=trials.db           | the storage: trials.db is no address & give sqlite:///FILE
search model data.jsonl --set storage=postgres://me:s@x/y | postgres://me:***@x/y is no address & postgresql+psycopg://
search model data.jsonl --storage sqlite:////dev/null/t.db | cannot use the storage
search model data.jsonl --set tracking_uri=sqlite:////dev/null/m.db | cannot use the MLflow store
search model data.jsonl --batch-size 0                    | '--batch-size': 0 is not in the range
search model data.jsonl --deploy-to vlm                   | 'vlm' is not one of 'llama.cpp', 'vllm'
search model data.jsonl --deploy-to llama.cpp             | --engine-home or LLAMA_CPP
search model data.jsonl --dataset gsm8k                   | dataset is given twice: 'data.jsonl' and --dataset 'gsm8k'
search model data.jsonl --set ray=localhost               | no Ray cluster answers & ray start --head
search --config nowhere.yaml                              | no such configuration: nowhere.yaml
search --config misspelt.yaml                             | unknown key 'modle'; did you mean 'model'
search --config wrong.yaml                                | trials: input should be a valid integer
search --config torn.yaml                                 | torn.yaml is not valid YAML
search model few.jsonl                                    | 5 rows, and 12 are needed & --held-out-prompts 2
search model empty.jsonl                                  | empty.jsonl is empty
search model noise.jsonl                                  | rows are objects, such as {"prompt": ...}
search model words.csv                                    | which column & --prompt-column, or give a --template; columns: a, b
search model picture.png                                  | unsupported format, '.png'; valid: .csv
search model nodata.jsonl                                 | no such dataset 'nodata.jsonl': neither a file
search model gsm8                                         | did you mean 'gsm8k'
search model gsm8k                                        | cannot read the hub dataset & a file or folder needs no hub
search model data.jsonl@test                              | has no configs and no splits
search model data.jsonl#task=qa                           | no column 'task' to choose rows by; valid: file, prompt
search model folder                                       | holds no data files (.csv
search nomodel data.jsonl                                 | no such model: nomodel is neither a model folder nor available
search https://hub/owner/name data.jsonl                  | a name on the hub is owner/name
search model.gguf data.jsonl                              | give the checkpoint that it was converted from
search lora data.jsonl                                    | merge it into its-base first, with peft's
search folder data.jsonl                                  | it has no config.json
search noweights data.jsonl                               | it has no weights, such as model.safetensors
search data.jsonl model                                   | data.jsonl is a file: give the folder of the model
distill model --dataset data.jsonl --exit-layers 99       | exits at layer 99, but it must be 1 to 5
distill model --dataset data.jsonl --exit-layers two      | must hold layer indices such as 7 or 12-15
show                                                      | Missing argument 'PROFILE|DIR'
show none.yaml                                            | no such profile: none.yaml
show torn.yaml                                            | torn.yaml is not valid YAML
show unknown.yaml                                         | unknown key 'speed'; valid: decoding, draft
show later.yaml                                           | schema is 'sdtune/v9', this version of sdtune reads 'sdtune/v1'
show folder                                               | `sdtune distill --out folder` makes them
report none.yaml                                          | neither a profile, nor the id of a run
report profile.yaml                                       | give the id of the search's run
generate profile.yaml                                     | Missing option '--prompt'
generate gone.yaml --prompt x                             | no such model: there is no folder
generate models:/x --prompt x                             | give models:/NAME@ALIAS or models:/NAME/VERSION
serve profile.yaml --port 99999                           | '--port': 99999 is not in the range
serve profile.yaml --chat-template none.jinja             | there is no file none.jinja
serve profile.yaml --host 0.0.0.0                         | set SDTUNE_API_KEY
export profile.yaml                                       | Missing option '--to'. Choose from: folder, vllm
export profile.yaml --to vlm --out o                      | 'vlm' is not one of 'folder'
export profile.yaml --to vllm --out data.jsonl            | it is a file; name a folder
export profile.yaml --to folder --out model               | replace an earlier export with --overwrite
promote profile.yaml --name x                             | Missing option '--why'
promote profile.yaml --name a/b --why y                   | leave out the characters / : @
doctor data.jsonl                                         | give the folder of the model
bench profile.yaml                                        | Missing argument 'DATASET'
bench profile.yaml data.jsonl --against hff               | unknown contender 'hff'; did you mean 'hf'
bench profile.yaml data.jsonl --engine vllm --engine-home folder | folder is no virtual environment
service --allow-model model --allow-dataset data.jsonl --host 0.0.0.0 | set SDTUNE_SERVICE_TOKEN
service --allow-model model --allow-dataset data.jsonl --limit timeout | is not a duration such as 90s
worker --database mysql://x                               | mysql://x is no address & give sqlite:///FILE
worker --device abacus                                    | no device 'abacus'
worker --queue 'a b'                                      | queue: & match
jobs lst                                                  | No such command 'lst' & Did you mean 'list'
jobs --address ftp://x list                               | ftp
"""
"""Command lines, each with what its message must hold."""


@pytest.fixture(scope="module")
def mistaken(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, data, a profile and much that is wrong."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "model").symlink_to(checkpoint)
    for name in ("folder", "lora", "noweights"):
        (folder / name).mkdir()
    profile = save_profile(folder / "profile.yaml", str(checkpoint), LayerSkip.blocks((2, 3))).read_text()
    texts = {
        "empty.jsonl": "",
        "noise.jsonl": "\0 garbage",
        "words.csv": "a,b\n1,2\n",
        "picture.png": "",
        "model.gguf": "GGUF",
        "lora/adapter_config.json": '{"base_model_name_or_path": "its-base"}',
        "noweights/config.json": (checkpoint / "config.json").read_text(),
        "misspelt.yaml": "modle: model\n",
        "wrong.yaml": "model: model\ndataset: data.jsonl\ntrials: many\n",
        "torn.yaml": "a: [1",
        "unknown.yaml": profile + "speed: 3\n",
        "later.yaml": profile.replace("sdtune/v1", "sdtune/v9"),
        "gone.yaml": profile.replace(str(checkpoint), "/no/such/folder"),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    write_tiny_prompts(folder / "data.jsonl", count=40)
    write_tiny_prompts(folder / "few.jsonl", count=5)
    return folder


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines(), ids=lambda line: line.split(" | ")[0].strip())
def test_a_mistake_is_refused_in_one_line_that_names_the_remedy(
    line: str, mistaken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, words = line.rsplit(" | ", 1)
    before = sorted(mistaken.rglob("*"))
    monkeypatch.chdir(mistaken)
    for name in ("LLAMA_CPP", "SDTUNE_API_KEY", "SDTUNE_SERVICE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # no weights are loaded
    refused(CliRunner().invoke(main, shlex.split(command)), *words.strip().split(" & "))
    assert sorted(mistaken.rglob("*")) == before


def test_a_store_that_does_not_answer_is_noticed_before_the_model_is_loaded(
    run_search: SearchCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.search.task.load", None)
    monkeypatch.setattr("tuner.tracking.BRIEF", {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"})
    refused(run_search(tracking_uri="http://127.0.0.1:9"), "cannot use the MLflow store")


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
