"""The contract of a cell: one search, one comparison, or the exit heads of one model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tuner.evaluation.suite.document import Suite
from tuner.evaluation.suite.records import CellRecord, CellRecords
from tuner.progress import Progress

if TYPE_CHECKING:
    from tuner.config import SearchConfig

PLACES = {"heads", "storage", "tracking_uri", "experiment", "out"}
"""Settings of a search that say where its files are, and decide nothing else."""
TRAINING = {"distill", "distillation"}
"""Settings of the exit heads."""


@dataclass(frozen=True)
class Place:
    """A suite and the folder of its results."""

    suite: Suite
    out: Path

    @property
    def records(self) -> CellRecords:
        """Outcomes of the cells so far."""
        return CellRecords(self.out)


@dataclass(frozen=True)
class CellSize:
    """Size of a cell, for an estimate of its time."""

    tokens: int
    """Most tokens that are decoded, by all contenders together."""
    seconds: float = 0.0
    """Time limit of its search or training, if it has one."""
    is_limited: bool = True
    """False if a search has no time limit, so that nobody knows how long it takes."""


class Cell(Protocol):
    """Work with a result of its own on disk, which is never done twice."""

    @property
    def id(self) -> str:
        """Folder below the folder of the cells, and name in reports."""

    @property
    def model(self) -> str:
        """Name of its model."""

    @property
    def precision(self) -> str:
        """Precision of the weights."""

    def key(self) -> str:
        """Return a hash of everything that the result depends on: settings, and results of other cells."""

    def size(self) -> CellSize:
        """Return the size of the cell."""

    def config(self) -> SearchConfig:
        """Return the configuration whose model, device and threads the cell uses."""

    def run(self, progress: Progress) -> dict[str, Any]:
        """Do the work and return the result, as JSON holds it. May raise anything: the cause is then recorded."""


def hashed(facts: Any) -> str:
    """Return the first 12 digits of the SHA-256 of facts, as JSON."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def record_of(place: Place, cell: Cell) -> CellRecord | None:
    """Return the record of a cell as it is now, or None if there is none."""
    return place.records.read(cell.id, cell.key())


def settings_that_decide(config: SearchConfig) -> dict[str, Any]:
    """Return the written settings of a configuration on which results depend, those of exit heads aside.

    Defaults are left out: a version with further settings goes on with the results of an earlier one.
    """
    return config.model_dump(mode="json", exclude=PLACES | TRAINING, exclude_unset=True)


def training_settings(config: SearchConfig) -> dict[str, Any]:
    """Return the settings of a configuration on which exit heads depend."""
    return config.model_dump(mode="json", include=TRAINING, exclude_unset=True)
