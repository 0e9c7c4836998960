"""Results of a bench in an engine. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.engines.paired import PairedTexts
    from tuner.export.prediction import PredictedSpeedup


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
