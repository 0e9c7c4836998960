"""Everything that is known about a finished search, as one document: stored, printed, and `search.json` in MLflow. Data only."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from decoding.documents.strict_yaml import Document
from decoding.profile import DraftProfile, Interval, SearchCost
from studies.contract import Candidate, TrialRecord
from studies.measurement import Measurement
from tuner.measuring.machine import MachineNoise
from tuner.results import Provenance

GENERATE, PROMPT_LOOKUP = "hf", "hf-prompt-lookup"
"""Names of transformers' own ways to generate in a `StockComparison`, as in `sdtune bench`."""


class MeasuredCandidate(Document):
    """A candidate as measured in the race, on tuning prompts, or in the confirmation, on held-out ones."""

    trial: str = Field(description="study and number, such as joint/3")
    origin: str = Field(description="the method that proposed the draft")
    candidate: Candidate
    measurement: Measurement = Measurement(samples=())

    @classmethod
    def of(cls, record: TrialRecord) -> MeasuredCandidate:
        """Return the candidate of a trial, without what the trial measured: that selected it, and flatters it."""
        return cls(trial=trial_name(record), origin=record.origin, candidate=record.candidate)

    @property
    def study(self) -> str:
        """Name of the study that tried it, and in the final table."""
        return self.trial.rpartition("/")[0]


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
    """By name; `PROFILE` is among them unless it decodes plainly."""
    left_out: dict[str, str] = Field(default_factory=dict, description="contenders that did not run, with the reasons")


class SearchResult(Document):
    """A finished search."""

    format: Literal[2] = 2
    experiment: str
    run_id: str
    address: str | None = Field(None, description="page of the search in the MLflow UI")
    profile: DraftProfile
    objection: str | None = Field(description="why no speed-up is claimed; None if one is")
    rivals: tuple[MeasuredCandidate, ...] = Field(min_length=1, description="on held-out prompts, the winner first")
    race: tuple[MeasuredCandidate, ...] = Field(description="the finalists on tuning prompts, the fastest first")
    trials: tuple[TrialRecord, ...] = Field((), description="empty where an earlier result is shown")
    comparison: StockComparison | None = None
    no_comparison: str | None = Field(None, description="why there is no comparison with stock generation")
    noise: MachineNoise
    ended: dict[str, str] = Field(description="by study: why it ended, and its remarks")
    cuts: tuple[str, ...] = Field(
        (), description="what was done on fewer prompts than configured, to keep within the time"
    )
    cautions: tuple[str, ...] = Field(
        (), description="further reasons for care, such as heads trained on tuning prompts"
    )
    stages: dict[str, float] = Field(description="seconds of each stage of this run")
    cost: SearchCost
    settings: dict[str, Any] = Field(description="configuration of the search, without addresses of stores")
    provenance: Provenance

    @property
    def winner(self) -> MeasuredCandidate:
        """The winner of the race, on held-out prompts. It is in the profile unless there is an objection."""
        return self.rivals[0]

    @property
    def confirmed(self) -> Measurement:
        """The winner's measurement on the held-out prompts."""
        return self.winner.measurement

    @property
    def winning_trial(self) -> TrialRecord | None:
        """Record of the winner's trial."""
        return next((each for each in self.trials if trial_name(each) == self.winner.trial), None)


def trial_name(record: TrialRecord) -> str:
    """Return study and number of a trial."""
    return f"{record.study}/{record.number}"
