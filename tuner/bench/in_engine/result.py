"""Results of a bench in an engine, of one request at a time or several. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.bench.in_engine.loads import LoadFigures
    from tuner.engines.paired import PairedTexts
    from tuner.export.prediction import PredictedSpeedup
    from tuner.export.schedule import MeasuredSchedule


@dataclass(frozen=True)
class EngineDraft:
    """A draft of the engine, measured in turns with its plain decoding."""

    name: str
    flags: tuple[str, ...]
    texts: PairedTexts
    seconds: float
    """Seconds that its measurement took, from the start of the server to its end."""


@dataclass(frozen=True)
class EngineResult:
    """All drafts of a bench in an engine; the profile's own is the first."""

    title: str
    version: str
    drafts: tuple[EngineDraft, ...]
    failed: dict[str, str]
    """Drafts that the engine did not run, with its reasons."""
    predicted: PredictedSpeedup
    """Prediction for the profile's draft, by the engine's rules."""
    facts: dict[str, Any]
    remarks: tuple[str, ...] = ()

    @property
    def num_different(self) -> int:
        """Number of texts that differ from the engine's plain decoding, ties apart."""
        return sum(each.texts.num_different for each in self.drafts)


@dataclass(frozen=True)
class DraftAtLoads:
    """One server with a draft, measured in turns with plain decoding at several numbers of sequences."""

    name: str
    num_tokens: int | None
    """Tokens to draft; None for the whole schedule."""
    flags: tuple[str, ...]
    loads: tuple[LoadFigures, ...]
    seconds: float
    """Seconds that its measurement took, from the start of the server to its end."""

    def at(self, sequences: int) -> LoadFigures:
        """Return the figures at a measured number of sequences."""
        return next(each for each in self.loads if each.sequences == sequences)

    @property
    def num_different(self) -> int:
        """Number of texts that differ from plain decoding's, ties apart."""
        return sum(each.num_different for each in self.loads)


@dataclass(frozen=True)
class LoadsResult:
    """All draft lengths of a bench by number of sequences, and the schedule from them."""

    title: str
    version: str
    drafts: tuple[DraftAtLoads, ...]
    failed: dict[str, str]
    """Lengths that the engine did not run, with its reasons."""
    schedule: MeasuredSchedule
    facts: dict[str, Any]
    remarks: tuple[str, ...] = ()

    @property
    def num_different(self) -> int:
        """Number of texts that differ from the engine's plain decoding, ties apart."""
        return sum(each.num_different for each in self.drafts)
