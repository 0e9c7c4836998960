"""Records of the steps on disk: one file per step, written as the step ends, and read again by a later run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from decoding.documents.atomic_write import write_atomically
from decoding.documents.strict_yaml import Document, validate
from tuner.errors import ConfigError

FOLDER = "steps"


class StepRecord(Document):
    """Outcome of a step."""

    name: str
    status: Literal["ok", "failed", "given up", "died"] = Field(
        description="failed: an error; given up: out of time; died: the process ended in it"
    )
    seconds: float
    cause: str = Field("", description="the error, or why the step was given up")
    warnings: tuple[str, ...] = Field((), description="each different warning once")
    result: dict[str, Any] | None = None


class StepRecords:
    """The records in one results folder, in a folder of their own."""

    def __init__(self, out: Path) -> None:
        self._folder = out / FOLDER

    def write(self, record: StepRecord) -> None:
        """Write a record atomically; raise `ConfigError` if that fails."""
        self._folder.mkdir(exist_ok=True, parents=True)
        content = json.dumps(record.model_dump(mode="json"), indent=1).encode()
        write_atomically(self._path(record.name), content, what="the results", error=ConfigError)

    def read(self, name: str) -> StepRecord | None:
        """Return the record of a step, or None if it has none. Raises `ConfigError` for a damaged file."""
        path = self._path(name)
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise ConfigError(f"{path} is damaged: delete it, and its step runs again") from None
        return validate(StepRecord, content, source=str(path), error=ConfigError)

    def unfinished(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the steps of `names` that have not succeeded, in order."""
        records = {name: self.read(name) for name in names}
        return tuple(name for name, record in records.items() if record is None or record.status != "ok")

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"
