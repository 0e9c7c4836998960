"""Results of cells, as plain data: what a search found, and the samples of a comparison."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from decoding.documents.strict_yaml import Document
from decoding.profile import Interval
from studies.measurement import Measurement, PromptSample


class SearchFound(Document):
    """Outcome of a search for one method on one task."""

    study: str = Field(description="study of the draft that stands for the method")
    draft: str = Field(description="that draft and its rule, in words")
    is_measurable: bool = Field(
        description="false if the best candidate is plain decoding: there is no draft to measure"
    )
    claims_speedup: bool = Field(description="true if the search wrote a profile that drafts, by that study")
    confirmed: Interval | None = Field(
        description="the draft's held-out speed-up in its search, if it was measured there"
    )
    candidate_sha256: str | None = Field(description="hash of candidate.yaml, the draft as a profile")
    trials: int
    search_seconds: float
    distillation_seconds: float
    studies: dict[str, str] = Field(description="why each study ended")


class HeadsFound(Document):
    """The exit heads of a model."""

    exits: tuple[int, ...]
    seconds: float


class MeasuredContender(Document):
    """A contender of one comparison, with its samples in the order of measurement."""

    description: str
    settings: dict[str, Any]
    samples: tuple[PromptSample, ...]

    @property
    def measurement(self) -> Measurement:
        """The samples as a measurement."""
        return Measurement(samples=self.samples)


class BenchFound(Document):
    """Contenders on the held-out prompts of one task, timed in turns in one process."""

    facts: dict[str, Any]
    counted: tuple[int, ...] = Field(description="prompts that every contender continued at sufficient length")
    num_prompts: int
    prompt_tokens: tuple[int, ...] = Field((), description="length of each prompt")
    measured: dict[str, MeasuredContender]
    same: dict[str, str] = Field(
        default_factory=dict, description="contenders with the same draft, rule and decoding as a measured one"
    )
    left_out: dict[str, str] = Field(description="contenders without figures, with the reasons")

    def of(self, name: str) -> MeasuredContender | None:
        """Return the contender `name`, or the measured one that is the same; None if it has no figures."""
        return self.measured.get(self.same.get(name, name))
