"""Everything a reviewer may ask about a finished search, as one document: `search.json` in MLflow. Data only."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from decoding.documents.strict_yaml import Document
from decoding.profile import DraftProfile, Interval
from studies.contract import TrialRecord
from studies.measurement import Measurement
from tuner.measuring.machine import MachineNoise
from tuner.results import Provenance


class MeasuredCandidate(Document):
    """A candidate as measured in the race, on tuning prompts, or in the confirmation, on the held-out ones."""

    trial: str = Field(description="study and number, such as joint/3")
    description: str
    measurement: Measurement
    label: str = Field("", description="name in the final table; empty in the race")


class StockContender(Document):
    """A way of decoding beside plain decoding, on a few held-out prompts."""

    description: str
    tokens_per_second: Interval
    over_plain: Interval
    end_to_end_over_plain: Interval
    profile_over_it: Interval
    texts: int
    identical: int
    ties: int


class StockComparison(Document):
    """The profile, plain decoding and transformers' own ways to generate, in turns on the same prompts."""

    num_prompts: int
    plain_tokens_per_second: Interval
    contenders: dict[str, StockContender]
    """By name; `profile` is among them."""
    left_out: dict[str, str] = Field(default_factory=dict, description="contenders that did not run, with the reasons")


class TextPair(Document):
    """A held-out prompt, its plain continuation and that of the winner."""

    prompt: str
    plain: str
    drafted: str
    identical: bool
    tie: bool = False


class SearchReview(Document):
    """A finished search."""

    format: Literal[1] = 1
    experiment: str
    run_id: str
    profile: DraftProfile
    objection: str | None = Field(description="why no speed-up is claimed; None if one is")
    winner: str = Field(description="trial that won the race, such as joint/3")
    rivals: tuple[MeasuredCandidate, ...] = Field(min_length=1, description="the winner first")
    race: tuple[MeasuredCandidate, ...]
    trials: tuple[TrialRecord, ...]
    comparison: StockComparison | None = None
    no_comparison: str | None = Field(None, description="why there is no comparison with stock generation")
    texts: tuple[TextPair, ...] = ()
    noise: MachineNoise
    ended: dict[str, str] = Field(description="by study: why it ended, and its remarks")
    cuts: tuple[str, ...] = ()
    cautions: tuple[str, ...] = Field(
        (), description="further reasons for care, such as heads trained on tuning prompts"
    )
    stages: dict[str, float] = Field(description="seconds of each stage of this run")
    search_seconds: float
    distillation_seconds: float
    settings: dict[str, Any] = Field(description="configuration of the search, without addresses of stores")
    provenance: Provenance

    @property
    def confirmed(self) -> Measurement:
        """The winner on the held-out prompts."""
        return self.rivals[0].measurement

    @property
    def winning_trial(self) -> TrialRecord | None:
        """Record of the winner's trial."""
        return next((each for each in self.trials if trial_name(each) == self.winner), None)


def trial_name(record: TrialRecord) -> str:
    """Return study and number of a trial."""
    return f"{record.study}/{record.number}"


def described(record: TrialRecord) -> str:
    """Return draft and draft-length rule of a trial in words."""
    draft, rule = record.candidate.draft, record.candidate.draft_length
    return f"{draft.describe()}; {rule.describe()}" if draft.drafts else draft.describe()
