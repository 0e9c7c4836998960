"""Outcomes of cells on disk: one file per cell, written as the cell ends, and read again by a later run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from decoding.documents.atomic_write import write_atomically
from decoding.documents.strict_yaml import Document, validate
from tuner.errors import ConfigError

CELLS, RECORD = "cells", "record.json"


class CellRecord(Document):
    """Outcome of a cell."""

    id: str
    key: str = Field(description="hash of everything that the result depends on")
    status: Literal["ok", "failed", "died"] = Field(description="failed: an error; died: its process ended in it")
    seconds: float
    cause: str = Field("", description="the error, or how the process ended")
    result: dict[str, Any] | None = None

    @property
    def is_done(self) -> bool:
        """True if the cell has a result."""
        return self.status == "ok"


class CellRecords:
    """The records in one results folder, each in the folder of its cell."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def folder(self, cell_id: str) -> Path:
        """Return the folder of a cell, which need not exist."""
        return self._out / CELLS / cell_id

    def write(self, record: CellRecord) -> None:
        """Write a record atomically; raise `ConfigError` if that fails."""
        folder = self.folder(record.id)
        folder.mkdir(exist_ok=True, parents=True)
        content = json.dumps(record.model_dump(mode="json")).encode()
        write_atomically(folder / RECORD, content, what="the results", error=ConfigError)

    def read(self, cell_id: str, key: str) -> CellRecord | None:
        """Return the record of a cell, or None if it has none with this key. Raises `ConfigError` for a damaged file."""
        path = self.folder(cell_id) / RECORD
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise ConfigError(f"{path} is damaged: delete it, and its cell runs again") from None
        record = validate(CellRecord, content, source=str(path), error=ConfigError)
        return record if record.key == key else None
