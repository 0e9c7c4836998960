"""Atomic file writes."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from decoding.errors import SdtuneError


def write_atomically(path: Path, content: bytes, *, what: str, error: type[SdtuneError]) -> None:
    """Write a temporary file beside `path` and rename it.

    Readers see the old content or all of the new. A symbolic link stays, and the file that it leads to is replaced. If writing
    fails, or `path` is not an ordinary file, raise `error` with `what` and the reason; then nothing has changed and no temporary
    file remains.
    """
    shown, path = path, path.resolve()
    if path.exists() and not path.is_file():
        raise error(f"cannot write {what} {shown}: it is not an ordinary file")
    try:
        with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as beside:
            whole = Path(beside) / path.name
            with whole.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            whole.replace(path)
    except OSError as cause:
        raise error(f"cannot write {what} {shown}: {cause.strerror or cause}") from None
