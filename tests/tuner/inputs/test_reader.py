"""Datasets that attack their reader: nesting, unpacking, names of files elsewhere. Each ends in one line."""

from __future__ import annotations

import gzip
import http.server
import json
import os
import signal
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from datasets import data_files
from pyarrow import parquet

from tests.support.reading import read_in_process
from tuner.errors import ConfigError, DatasetError
from tuner.fields import PromptSettings
from tuner.inputs.datasets import open_table
from tuner.inputs.reader import MEMORY, READER, SECONDS
from tuner.inputs.rows import open_rows

ROWS = [{"prompt": f"prompt {number}"} for number in range(4)]


@pytest.fixture
def _limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A reader with little memory and time, for this test only."""
    READER.close()
    monkeypatch.setenv(MEMORY, str(2**27))
    monkeypatch.setenv(SECONDS, "20")
    yield
    READER.close()


def write(path: Path, rows: list[Any] = ROWS) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def refusal(source: Path | str) -> str:
    """Return why a source cannot be read."""
    with pytest.raises(DatasetError) as refused:
        prompts(source)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000
    return str(refused.value)


def prompts(source: Path | str) -> list[Any]:
    table = open_table(str(source))
    return [table.row(index, {"prompt"})["prompt"] for index in range(table.num_rows)]


class TestLimits:
    @pytest.mark.parametrize(("depth", "ending"), [(40, "jsonl"), (1_000_000, "json")])
    def test_nesting(self, depth: int, ending: str, tmp_path: Path) -> None:
        path = tmp_path / f"deep.{ending}"
        path.write_text('{"prompt": ' + "[" * depth + "]" * depth + "}")
        assert "more than 32 deep" in refusal(path)
        assert prompts(write(tmp_path / "good.jsonl")) == [row["prompt"] for row in ROWS]

    def test_a_death_of_the_reader_is_one_line(self, tmp_path: Path) -> None:
        table = open_table(str(path := write(tmp_path / "good.jsonl")))
        assert READER._process is not None
        READER._process.kill()
        READER._process.wait()
        with pytest.raises(DatasetError, match="cannot be read: its reader was ended by SIGKILL"):
            table.row(1, {"prompt"})
        assert table.row(1, {"prompt"}) == ROWS[1], "a new reader goes on"
        assert prompts(path) == [row["prompt"] for row in ROWS]

    @pytest.mark.usefixtures("_limits")
    def test_a_line_that_unpacks(self, tmp_path: Path) -> None:
        path = tmp_path / "bomb.jsonl.gz"
        with gzip.open(path, "wb", 1) as file:
            file.write(b'{"prompt": "')
            for _ in range(3 * 2**10):
                file.write(b"a" * 2**18)
            file.write(b'"}\n')
        assert "cannot" in refusal(path)

    def test_a_row_that_no_prompt_has(self, tmp_path: Path) -> None:
        assert "row 1 of the dataset" in refusal(write(tmp_path / "a.jsonl", [ROWS[0], {"prompt": "a" * 2**25}]))

    @pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
    def test_columns(self, ending: str, tmp_path: Path) -> None:
        path = tmp_path / f"wide.{ending}"
        columns = [f"c{number}" for number in range(12_000)]
        if ending == "csv":
            path.write_text(",".join(columns) + "\n" + ",".join("1" for _ in columns) + "\n")
        elif ending == "jsonl":
            write(path, [dict.fromkeys(columns, 1)])
        else:
            parquet.write_table(pyarrow.table({name: [1] for name in columns}), path)
        assert "12000 columns, and at most 10000 are read" in refusal(path)

    def test_a_reader_that_does_not_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        table = open_table(str(write(tmp_path / "good.jsonl")))
        assert READER._process is not None
        os.kill(READER._process.pid, signal.SIGSTOP)
        monkeypatch.setenv(SECONDS, "1")
        with pytest.raises(DatasetError, match=f"cannot be read within 1 seconds: {SECONDS} sets another limit"):
            table.row(1, {"prompt"})
        monkeypatch.delenv(SECONDS)
        assert table.row(1, {"prompt"}) == ROWS[1]

    def test_wrong_limits_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        READER.close()
        monkeypatch.setenv(MEMORY, "4 GiB")
        with pytest.raises(ConfigError, match=f"{MEMORY} is '4 GiB': give a whole number"):
            open_table(str(write(tmp_path / "good.jsonl")))

    def test_a_pipe_is_no_file(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "a.jsonl")
        assert "neither a file nor a folder" in refusal(tmp_path / "a.jsonl")
        assert "is not an ordinary file" in refusal(tmp_path)

    def test_the_current_folder_is_not_imported_from(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        READER.close()
        for name in ("datasets", "json", "tuner"):
            (tmp_path / f"{name}.py").write_text("open('executed', 'w')")
        monkeypatch.chdir(tmp_path)
        assert prompts(write(tmp_path / "good.jsonl"))
        assert not (tmp_path / "executed").exists()

    def test_a_checkout_reads_without_being_installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        READER.close()
        python = tmp_path / "python"  # knows what is installed, but no package that a checkout is the source of
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        monkeypatch.setenv("PYTHONPATH", sysconfig.get_path("purelib"))
        assert prompts(write(tmp_path / "good.jsonl"))
        READER.close()


def test_a_category_is_one_line_of_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "x", "category": "a\x1b[2J\nb"}])
    rows = open_rows(str(path), PromptSettings())
    assert rows.category(rows.row(0)) == "a [2J b"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    return write(tmp_path / "elsewhere" / "secret.jsonl", [{"prompt": f"SECRET {number}"} for number in range(4)])


@pytest.fixture
def address() -> Iterator[tuple[str, list[str]]]:
    """An HTTP server, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    thread.join()
    server.server_close()


class TestFoldersOfOthers:
    @pytest.fixture
    def _online(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        READER.close()
        monkeypatch.delenv("HF_HUB_OFFLINE")
        yield
        READER.close()

    @pytest.mark.usefixtures("_online")
    def test_the_card_of_a_folder_is_not_read(
        self, tmp_path: Path, secret: Path, address: tuple[str, list[str]]
    ) -> None:
        for number, written in enumerate(
            (
                "data_files: {secret}",
                "data_files: ../elsewhere/secret.jsonl",
                "data_files: '../*/*.jsonl'",
                "data_files: file://{secret}",
                "data_files: zip://*::file://{secret}",
                "data_files: {address}/x.jsonl",
                "data_files: [{{split: train, path: '{address}/x.jsonl'}}]",
                "data_files: hf://datasets/owner/name/x.jsonl",
                "data_dir: ../elsewhere",
                "data_dir: {secret.parent}",
            )
        ):
            folder = write(tmp_path / str(number) / "a.jsonl").parent
            entry = written.format(secret=secret, address=address[0])
            (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  {entry}\n---\n")
            infos = {"default": {"download_checksums": {address[0]: {}}}}
            (folder / "dataset_infos.json").write_text(json.dumps(infos))
            (folder / f"{number}.py").write_text("open('executed', 'w')")
            assert prompts(folder) == [row["prompt"] for row in ROWS]
        assert address[1] == []

    def test_links_that_leave_the_folder(self, tmp_path: Path, secret: Path) -> None:
        write(tmp_path / "folder" / "a.jsonl")
        (tmp_path / "folder" / "b.jsonl").symlink_to(secret)
        assert "is a link to a file outside" in refusal(tmp_path / "folder")
        (tmp_path / "folder" / "b.jsonl").unlink()
        (tmp_path / "folder" / "c").symlink_to(secret.parent)
        assert prompts(tmp_path / "folder") == [row["prompt"] for row in ROWS]
        assert "no config 'c'" in refusal(f"{tmp_path / 'folder'}:c")
        assert "no config '..'" in refusal(f"{tmp_path / 'folder'}:..")

    def test_the_state_of_a_saved_dataset_is_not_read(self, tmp_path: Path) -> None:
        datasets.Dataset.from_list(ROWS).save_to_disk(folder := tmp_path / "saved")
        datasets.Dataset.from_list([{"prompt": "SECRET"}]).save_to_disk(other := tmp_path / "elsewhere")
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps({**state, "_data_files": [{"filename": "../elsewhere/x.arrow"}]}))
        assert prompts(folder) == [row["prompt"] for row in ROWS]
        next(folder.glob("*.arrow")).unlink()
        (folder / "data-00000-of-00001.arrow").symlink_to(next(other.glob("*.arrow")))
        assert "is a link to a file outside" in refusal(folder)

    def test_archives_are_no_data_files(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "data.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.jsonl", json.dumps(ROWS[0]))
        assert "holds no data files" in refusal(tmp_path)

    def test_a_name_that_fsspec_takes_apart(self, tmp_path: Path, secret: Path) -> None:
        assert "has '::' in its name" in refusal(write(tmp_path / "zip::a.jsonl"))
        assert "has '::' in its name" in refusal(write(tmp_path / "folder" / f"x::{secret.name}").parent)

    @pytest.mark.usefixtures("_online")
    def test_images_are_not_opened(self, tmp_path: Path, secret: Path, address: tuple[str, list[str]]) -> None:
        schema = datasets.Features({"prompt": datasets.Image()}).arrow_schema
        places = [{"bytes": None, "path": str(secret)}, {"bytes": None, "path": f"{address[0]}/x.png"}]
        parquet.write_table(pyarrow.table({"prompt": places}, schema=schema), tmp_path / "a.parquet")
        table = open_table(str(tmp_path / "a.parquet"))
        assert table.row(0, {"prompt"}) == {"prompt": {"bytes": None, "path": str(secret)}}
        assert table.row(1, {"prompt"})
        assert address[1] == []


@pytest.mark.parametrize(
    ("pattern", "base"),
    [
        ("/etc/passwd", "hf://datasets/owner/name@main"),
        ("../other/x", "hf://datasets/owner/name@main"),
        ("zip://*::http://127.0.0.1:9/x", "hf://datasets/owner/name@main"),
        ("hf://datasets/owner/name@main/../../other/x", "hf://datasets/owner/name@main"),
        ("passwd", "/etc"),
        ("x", "hf://datasets/owner/name@main/../../other"),
    ],
)
def test_the_card_of_a_hub_dataset_names_its_own_files(
    pattern: str, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(data_files, "resolve_pattern", lambda *each: asked.append(each))

    def load_dataset(*_: Any, **__: Any) -> None:
        data_files.resolve_pattern("data/x", "hf://datasets/owner/name@main")
        data_files.resolve_pattern(pattern, base)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    read_in_process(monkeypatch)
    assert "names data files outside of its repository" in refusal("owner/name")
    assert asked == [("data/x", "hf://datasets/owner/name@main")]
