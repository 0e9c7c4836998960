"""Held-out measurements of candidates, side by side; every sample is stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from decoding.documents.atomic_write import write_atomically
from decoding.documents.strict_yaml import Document
from studies.contract import Candidate
from studies.measurement import Measurement, PromptSample
from tuner.errors import ConfigError
from tuner.measuring.paired import Bench
from tuner.progress import Progress

CHUNK = 8
"""Maximum number of candidates that share one plain decoding per prompt; all of them are in memory together."""


class _Line(Document):
    """Line of the file: a candidate, its warmed-up version, and its samples."""

    candidate: Candidate
    warmed_up: Candidate
    samples: tuple[PromptSample, ...] = ()


class HeldOutSamples:
    """Held-out samples of candidates, in a JSON-lines file whose first line identifies the problem."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Read or create the file.

        Raises `ConfigError` if it cannot be read or written, or belongs to another problem.
        """
        self._path = path
        self._identity = json.loads(json.dumps(identity))
        self._lines = self._read() if path.exists() else {}
        self._save()

    def measurements(self) -> dict[str, Measurement]:
        """Return the measurement of each candidate so far, by its key."""
        return {key: Measurement(samples=line.samples) for key, line in self._lines.items()}

    def warmed_up(self, candidate: Candidate) -> Candidate:
        """Return the candidate as it was measured, with its warmed-up rule."""
        return self._lines[candidate.key].warmed_up

    def complete(
        self,
        candidates: Iterable[Candidate],
        bench: Bench,
        warm_up: Callable[[Candidate], Candidate],
        progress: Progress,
    ) -> None:
        """Measure the missing samples of `candidates` on all prompts of `bench`.

        `warm_up` prepares new candidates.
        """
        wanted = {candidate.key: candidate for candidate in candidates}
        for key, candidate in wanted.items():
            if key not in self._lines:
                self._lines[key] = _Line(candidate=candidate, warmed_up=warm_up(candidate))
        missing = {key: self._missing(key, len(bench.prompts)) for key in wanted}
        progress.stage("incumbents on held-out prompts", sum(map(len, missing.values())))
        for keys, indices in _chunks(missing):
            self._measure(keys, indices, bench, progress)

    def _measure(self, keys: Sequence[str], indices: Sequence[int], bench: Bench, progress: Progress) -> None:
        turns = cycle(keys)

        def keep(sample: PromptSample) -> None:
            key = next(turns)
            line = self._lines[key]
            self._lines[key] = line.model_copy(update={"samples": (*line.samples, sample)})
            progress.advance()
            if key == keys[-1]:
                self._save()

        bench.side_by_side([self._lines[key].warmed_up for key in keys], indices, on_sample=keep)

    def _missing(self, key: str, num_prompts: int) -> tuple[int, ...]:
        known = {sample.prompt for sample in self._lines[key].samples}
        return tuple(index for index in range(num_prompts) if index not in known)

    def _save(self) -> None:
        lines = [json.dumps({"identity": self._identity}), *(line.model_dump_json() for line in self._lines.values())]
        content = "\n".join(lines) + "\n"
        write_atomically(self._path, content.encode(), what="the held-out samples", error=ConfigError)

    def _read(self) -> dict[str, _Line]:
        try:
            first, *others = self._path.read_text(encoding="utf-8").splitlines()
            known = json.loads(first)["identity"]
            lines = [_Line.model_validate_json(line) for line in others]
        except OSError as cause:
            raise ConfigError(f"cannot read the held-out samples {self._path}: {cause.strerror}") from None
        except (ValidationError, ValueError, LookupError, TypeError):
            raise ConfigError(
                f"{self._path} does not hold the held-out samples of a comparison: remove it, or give another --out"
            ) from None
        keys = sorted({*known, *self._identity})
        if differing := [key for key in keys if known.get(key) != self._identity.get(key)]:
            raise ConfigError(
                f"{self._path.parent} holds a comparison with another {' and '.join(differing)}: give another --out"
            )
        return {line.candidate.key: line for line in lines}


def _chunks(missing: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """Yield groups of at most `CHUNK` candidates that lack the same prompts."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for key, indices in missing.items():
        if indices:
            alike.setdefault(indices, []).append(key)
    for indices, keys in alike.items():
        for start in range(0, len(keys), CHUNK):
            yield keys[start : start + CHUNK], indices
