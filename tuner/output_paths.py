"""Checks that outputs can be written, made before a long run begins."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryFile

from decoding.errors import ProfileError, SdtuneError

OURS = (re.compile(rb"^schema: ['\"]?sdtune/", re.MULTILINE), re.compile(rb'^\{\s*"provenance"'))
"""Beginnings of files that sdtune wrote: profiles, and results."""
LENGTH_OF_A_BEGINNING = 4096
"""Bytes that are read of a file to recognise it."""


def check_writable(out: Path) -> None:
    """Raise `ProfileError` unless the file `out` can be written: a profile or a report.

    A file that is there already may be replaced only if it has the form of what sdtune writes: a profile, or JSON of results.
    """
    if out.is_dir():
        raise ProfileError(
            f"cannot write the profile {out}: it is a folder; name a file such as {out / 'profile.yaml'}"
        )
    if not out.parent.is_dir():
        raise ProfileError(f"cannot write the profile {out}: there is no folder {out.parent}")
    try:
        _probe(out.parent)
    except OSError as cause:
        raise ProfileError(f"cannot write the profile {out}: {cause.strerror}") from None
    if out.exists() and not _is_replaceable(out):
        raise ProfileError(
            f"{out} is there already and is not a file that sdtune wrote: name another file, or remove it"
        )


def _is_replaceable(out: Path) -> bool:
    """Return True for an empty file, a profile, or a JSON document with its provenance."""
    if not out.is_file():
        return False
    try:
        with out.open("rb") as file:
            beginning = file.read(LENGTH_OF_A_BEGINNING)
    except OSError:
        return False
    return not beginning or any(pattern.search(beginning) for pattern in OURS)


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
