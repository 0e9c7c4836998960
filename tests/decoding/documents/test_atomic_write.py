"""Atomic writes: all of the new content or the old file, whatever fails; profiles and heads are written by them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from decoding.documents.atomic_write import write_atomically
from decoding.errors import ProfileError


def write(path: Path, content: bytes = b"new") -> None:
    write_atomically(path, content, what="the profile", error=ProfileError)


def test_a_file_is_replaced_and_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    write(path, b"old")
    write(path)
    (tmp_path / "plain").touch()
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["p.yaml", "plain"]


@pytest.mark.parametrize("operation", ["os.fsync", "pathlib.Path.replace"])
def test_a_full_disk_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "p.yaml"
    write(path, b"old")
    monkeypatch.setattr(operation, full)
    with pytest.raises(ProfileError, match=r"cannot write the profile .*p\.yaml: No space left on device"):
        write(path)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.yaml"]


def test_a_path_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for path in ("no/p.yaml", "folder", "file/p.yaml", "pipe"):
        with pytest.raises(ProfileError, match="cannot write the profile") as refused:
            write(tmp_path / path)
        assert "\n" not in str(refused.value)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder", "pipe"]


def test_a_symbolic_link_stays(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
