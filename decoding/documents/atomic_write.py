"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from decoding.errors import SdtuneError


def write_atomically(path: Path, content: bytes, *, what: str, error: type[SdtuneError]) -> None:
    """Write a file beside its place and rename it: whoever reads finds the old one or all of the new one.

    Raises `error`, which says that `what` could not be written and why; then nothing has changed and nothing is left behind.
    """
    try:
        with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as beside:
            whole = Path(beside) / path.name
            with whole.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            whole.replace(path)
    except OSError as cause:
        raise error(f"cannot write {what} {path}: {cause.strerror or cause}") from None
