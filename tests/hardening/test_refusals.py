"""Models, outputs, stores and documents that used to be accepted, destroyed or answered with a traceback."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from safetensors.torch import load_file, save_file

from decoding.documents.strict_yaml import read_mapping
from decoding.drafts import LayerSkip
from decoding.errors import ProfileError
from tests.support.profiles import save_profile
from tests.support.refusals import refused
from tests.support.tiny import save_tiny_checkpoint, write_tiny_prompts
from tuner.cli.main import Termination, main
from tuner.cli.terminal import TerminalProgress, use_threads
from tuner.databases import refuse_unusable_database
from tuner.errors import ConfigError, StorageError, without_password
from tuner.inputs.model_folder import check_folder
from tuner.inputs.models import load
from tuner.output_paths import check_writable


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_tiny_checkpoint(tmp_path / "model", 2)


def test_missing_weights_are_refused(checkpoint: Path) -> None:
    """transformers fills in random ones."""
    weights = load_file(checkpoint / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "layers.1.mlp" not in name}
    save_file(kept, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 3 weights of its model, such as model\.layers\.1\.mlp"):
        load(str(checkpoint))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.safetensors", lambda content: content[:-100]),
        ("model.safetensors", lambda content: b""),
        ("config.json", lambda content: b"[]"),
        ("config.json", lambda content: content.replace(b'"hidden_size": 32', b'"hidden_size": "x"')),
        ("config.json", lambda content: content.replace(b'"hidden_size": 32', b'"hidden_size": 64')),
        ("tokenizer.json", lambda content: content[:50]),
    ],
    ids=["cut weights", "no weights", "list", "wrong type", "other shape", "cut tokenizer"],
)
def test_a_broken_model_is_one_line(checkpoint: Path, name: str, change: object) -> None:
    assert callable(change)
    path = checkpoint / name
    path.write_bytes(change(path.read_bytes()))
    refused(CliRunner().invoke(main, ["doctor", "--model", str(checkpoint)]), "model")


def test_only_what_sdtune_wrote_is_replaced(tmp_path: Path, checkpoint: Path) -> None:
    for name, content in (("data.jsonl", '{"prompt": "x"}'), ("config.yaml", "model: m\n"), ("trials.db", "SQLite")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ProfileError, match="is there already and is not a file that sdtune wrote"):
            check_writable(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ProfileError, match="is there already"):
        check_writable(tmp_path / "pipe")
    check_writable(save_profile(tmp_path / "profile.yaml", checkpoint, LayerSkip.blocks((1,))))
    check_writable(tmp_path / "new.yaml")


def test_databases_of_other_applications_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE customers (id INTEGER)")
    before = path.read_bytes()
    with pytest.raises(StorageError, match=r"another application \(tables: customers"):
        refuse_unusable_database(f"sqlite:///{path}", what="the storage", tables=("studies",), error=StorageError)
    assert path.read_bytes() == before
    with pytest.raises(StorageError, match="is a folder"):
        refuse_unusable_database(f"sqlite:///{tmp_path}", what="the storage", tables=("studies",), error=StorageError)
    refuse_unusable_database(
        f"sqlite:///{tmp_path / 'new.db'}", what="the storage", tables=("studies",), error=StorageError
    )


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
        + "\n".join(
            f"{b}: &{b} [{', '.join(f'*{a}' for _ in range(10))}]" for a, b in zip("abcdefg", "bcdefgh", strict=True)
        ),
        "name: &a [*a]\n",
    ],
    ids=["bomb", "inside itself"],
)
def test_documents_that_grow_without_end_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError, match="more than 50000 values"):
        read_mapping(path, what="profile", error=ProfileError)


def test_passwords_are_not_shown(tmp_path: Path, checkpoint: Path) -> None:
    assert without_password("postgresql://me:p@ss@host/db") == "postgresql://me:***@host/db"
    assert without_password("https://host:5000/a@b") == "https://host:5000/a@b"
    prompts = write_tiny_prompts(tmp_path / "prompts.jsonl", count=60)
    places = ["--set", f"tracking_uri=sqlite:///{tmp_path / 'mlflow.db'}", "--out", str(tmp_path / "p.yaml")]
    search = ["search", "--model", str(checkpoint), "--dataset", str(prompts), "--threads", "1", *places]
    result = CliRunner().invoke(main, [*search, "--storage", "nodb://me:secret@host/db"])
    refused(result, "is no address of a database", "nodb://me:***@host/db")
    assert "secret" not in result.output


def test_brackets_in_messages_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalProgress(Console(width=200)) as progress:
        progress.stage("loading [v2]-model", 3)
        progress.show("best [/a]")
        progress.say("cannot open [/a/b] now")
    shown = capsys.readouterr().out
    assert "loading [v2]-model (3)" in shown
    assert "cannot open [/a/b] now" in shown


def test_sigterm_is_an_interruption() -> None:
    def wait() -> None:
        with termination:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    termination = Termination()
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert termination.was_asked
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_code_that_ends_the_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(path: Path) -> None:
        raise SystemExit(0)

    monkeypatch.setattr("decoding.profile.DraftProfile.load", give_up)
    (tmp_path / "p.yaml").touch()
    ended = CliRunner().invoke(main, ["show", str(tmp_path / "p.yaml")])
    assert ended.exit_code == 1
    assert ended.stderr.startswith("sdtune: ended by SystemExit: 0, raised at ")
    assert f"{Path(__file__).name}:{give_up.__code__.co_firstlineno + 1}" in ended.stderr


def test_counters_are_not_cut_in_a_narrow_terminal() -> None:
    console = Console(width=80, force_terminal=True, record=True)
    with console.capture(), TerminalProgress(console) as progress:
        progress.stage("making the model ready for fixed shapes, which takes a while (runner static)", 24)
        progress.advance(22)
        progress.show("best 2.09x, " + 10 * "a long description ")
        lines = [
            "".join(segment.text for segment in line)
            for renderable in progress._bar.get_renderables()
            for line in console.render_lines(renderable)
        ]
    assert "22/24" in lines[0]
    assert "0:00:0" in lines[0]
    assert lines[1].startswith("best 2.09x")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"adapter_config.json": '{"base_model_name_or_path": "org/base"}', "adapter_model.safetensors": ""},
            "org/base",
        ),
        ({"adapter_config.json": "[]"}, "merge it into its base model first"),
        ({"model-q4.gguf": "GGUF"}, "give the checkpoint that it was converted from"),
        ({"weights.txt": ""}, "has no config.json"),
    ],
    ids=["adapter", "broken adapter", "gguf", "neither"],
)
def test_a_folder_of_another_kind_says_what_would_be_right(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=words):
        check_folder(str(tmp_path))


def test_a_file_is_no_model(tmp_path: Path) -> None:
    for name, words in (("m.gguf", "format GGUF"), ("model.safetensors", "is a file: give the folder")):
        (tmp_path / name).write_text("")
        with pytest.raises(ConfigError, match=words):
            check_folder(str(tmp_path / name))


def test_more_threads_than_cores_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    use_threads(2)
    assert not capsys.readouterr().err
    use_threads(99)
    assert "--threads 99, but there are 2 cores: give 2 or fewer" in capsys.readouterr().err
