"""Checks that outputs can be written, made before a long run begins."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile

from decoding.errors import ProfileError, SdtuneError


def check_writable(
    out: Path, *, what: str = "the profile", name: str = "profile.yaml", error: type[SdtuneError] = ProfileError
) -> None:
    """Raise `error` unless the file `out` can be written; `what` and the usual `name` of such a file are for the message."""
    if out.is_dir():
        raise error(f"cannot write {what} {out}: it is a folder; name a file such as {out / name}")
    if not out.parent.is_dir():
        raise error(f"cannot write {what} {out}: there is no folder {out.parent}")
    try:
        _probe(out.parent)
    except OSError as cause:
        raise error(f"cannot write {what} {out}: {cause.strerror}") from None


def check_folder_writable(folder: Path, *, what: str, error: type[SdtuneError]) -> Path:
    """Return the nearest existing folder above or at `folder`; raise `error` unless it can be written."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise error(f"cannot write {what} into {folder}: {existing} is a file; name a folder")
    try:
        _probe(existing)
    except OSError as cause:
        raise error(f"cannot write {what} into {folder}: {cause.strerror}") from None
    return existing


def _probe(folder: Path) -> None:
    with TemporaryFile(dir=folder):
        pass
