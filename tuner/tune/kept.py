"""What a tuning has measured, on disk as soon as it is known: the same command goes on from there after a kill."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decoding.fingerprint import hash_json
from studies.measurement import Measurement
from tuner.engines.bench import Crowd, LoadFigures

FILE = "measured.jsonl"


class KeptMeasurements:
    """The measurements of one tuning in a folder, a JSON line each; those of a tuning with other settings are dropped."""

    def __init__(self, out: Path, identity: Any, *, hidden: str) -> None:
        """`hidden` is a folder in flags that is another in each run."""
        self._path, self._hidden = out / FILE, hidden
        self._found: dict[str, LoadFigures] = {}
        self.seconds = 0.0
        """What they took."""
        header = json.dumps(identity, sort_keys=True)
        lines = self._path.read_text(encoding="utf-8").split("\n") if self._path.exists() else []
        # The last piece is empty, or a line that a kill cut off.
        kept = lines[1:-1] if lines and lines[0] == header else []
        out.mkdir(parents=True, exist_ok=True)
        self._path.write_text("".join(f"{line}\n" for line in (header, *kept)), encoding="utf-8")
        for line in kept:
            self._read(json.loads(line))

    def __len__(self) -> int:
        return len(self._found)

    def get(self, crowd: Crowd, flags: Sequence[str], sequences: int) -> LoadFigures | None:
        """Return what a server with these flags did with these prompts side by side, if it was measured."""
        return self._found.get(self._key(crowd, flags, sequences))

    def keep(self, crowd: Crowd, flags: Sequence[str], figures: LoadFigures, seconds: float) -> None:
        """Write a measurement, which took `seconds`, to disk."""
        line = {
            "key": self._key(crowd, flags, figures.sequences),
            "sequences": figures.sequences,
            "different": figures.num_plain_different,
            "seconds": seconds,
            "measurement": figures.measurement.model_dump(mode="json"),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")

    def discard(self) -> None:
        """Remove the file of a tuning that has its result: the next one measures anew."""
        self._path.unlink(missing_ok=True)

    def _read(self, line: dict[str, Any]) -> None:
        measurement = Measurement.model_validate(line["measurement"])
        self._found[line["key"]] = LoadFigures(line["sequences"], measurement, line["different"])
        self.seconds += line["seconds"]

    def _key(self, crowd: Crowd, flags: Sequence[str], sequences: int) -> str:
        return hash_json([crowd.prompts, crowd.alone, shlex.join(flags).replace(self._hidden, ""), sequences])
