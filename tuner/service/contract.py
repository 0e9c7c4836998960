"""The documents of the service: what a client sends and what it gets."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from decoding.documents.strict_yaml import Document
from decoding.errors import SdtuneError
from decoding.profile import Interval
from tuner.drift.contract import DriftVerdict, Promised

DEFAULT_QUEUE = "default"
JOB_ID = r"^[0-9a-f]{16}$"
"""Pattern of the id of a search."""


class ServiceError(SdtuneError):
    """A request that the service refuses."""


class UnknownJobError(ServiceError):
    """A job that does not exist."""


class JobState(StrEnum):
    """What a job does."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        """True if nothing happens any more without a request."""
        return self in (JobState.FINISHED, JobState.FAILED, JobState.CANCELLED)


class NoResultError(ServiceError):
    """A job that has no result yet."""

    def __init__(self, job: str, state: JobState) -> None:
        super().__init__(f"the search {job} is {state}")


class SearchRequest(Document):
    """The body of POST /v1/searches."""

    config: dict[str, Any] = Field(
        description="Configuration of the search, with the keys of `sdtune search --config`."
    )
    queue: str = Field(
        DEFAULT_QUEUE,
        min_length=1,
        max_length=100,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="Workers that may run the search, by the queue that they serve.",
    )
    heads: str | None = Field(
        None, pattern=JOB_ID, description="Id of a finished search whose exit heads and feature head this one takes."
    )


class Retuning(Document):
    """Why a search is run again: the profile in use has lost its speed-up in production."""

    root: str = Field(description="Id of the search that was submitted.")
    champion: str = Field(description="Id of the search whose profile is in use: the root's, or one that was re-tuned.")
    has_same_data: bool = Field(description="False if the data set has changed since the root was submitted.")
    promote: bool = Field(description="Whether the alias of the champion goes to a profile that is faster.")
    replays: bool = Field(
        False, description="Whether texts of production are replayed first, to order what is measured."
    )


class PredictedCandidate(Document):
    """A candidate as it is predicted on texts of production. Nothing of it was measured there."""

    description: str
    origin: Literal["champion", "trial", "lookup"] = Field(
        description="The profile in use, a trial of its search, or a lookup that was tried beside them."
    )
    predicted_speedup: float = Field(description="Over plain decoding, by replay and measured costs of passes.")


class TextReplay(Document):
    """What was replayed before a search was run again. Predictions: they order what is measured, and are no measurements."""

    texts: int = Field(description="Texts of production that were replayed.")
    tokens: int = Field(0, description="Their continuations' tokens.")
    left_out: int = Field(0, description="Texts that this model does not write so, or that do not fit into it.")
    predicted: list[PredictedCandidate] = Field(default_factory=list, description="The fastest first.")
    seconds: float = Field(0.0, description="Time of the replay, costs of passes included.")

    def describe(self) -> str:
        """Return a line for users."""
        left_out = f"{self.left_out} left out, which this model does not write so" if self.left_out else ""
        if not self.predicted:
            return f"no text of production to replay{left_out and f': {left_out}'}"
        best = self.predicted[0]
        champion = next((each for each in self.predicted if each.origin == "champion"), None)
        known = "" if champion is None else f"; the champion {champion.predicted_speedup:.2f}x"
        return (
            f"replayed {self.texts} texts of production{left_out and f' ({left_out})'}: predicted best "
            f"{best.predicted_speedup:.2f}x, {best.description}{known}"
        )


class ChampionContest(Document):
    """What a search that was re-tuned has found in turns with the champion."""

    champion: str = Field(description="Id of the search whose profile was in use.")
    over_champion: Interval | None = Field(
        None, description="Speed over the champion's on held-out prompts; None if they were not compared."
    )
    reason: str | None = Field(None, description="Why the champion stays; None if the new profile is faster.")
    promoted: list[str] = Field(default_factory=list, description="Addresses in the registry that it took over.")


class JobProgress(Document):
    """What a running search said last."""

    stage: str = ""
    done: int = 0
    total: int | None = None
    trials: int = 0
    best_speedup: float | None = None
    best_draft: str | None = None
    message: str = ""


class TableRow(Document):
    """A row of the final table: speed-ups over plain decoding on held-out prompts, with 95 % intervals."""

    label: str
    description: str
    speedup: float | None = None
    low: float | None = None
    high: float | None = None


class JobResult(Document):
    """What a finished search has found."""

    profile: str = Field(description="The profile, as YAML.")
    files: list[str] = Field(default_factory=list, description="Files that belong beside the profile.")
    claims_speedup: bool = Field(description="False if the profile decodes plainly.")
    rows: list[TableRow]
    report: str = Field(description="The final tables as text.")
    mlflow_run: str
    winner: dict[str, Any] | None = Field(
        None, description="Draft and rule of the profile, with heads by their names in the search's folder of heads."
    )
    contest: ChampionContest | None = Field(None, description="None unless the search was re-tuned.")
    promised: Promised | None = Field(
        None,
        description="What production is compared with; None if the profile decodes plainly or was measured in an engine, and in "
        "results of earlier versions.",
    )


class SearchJob(Document):
    """One search: GET /v1/searches/ID."""

    id: str
    state: JobState
    queue: str
    model: str
    dataset: str
    created_seconds: float = Field(description="Seconds since 1970.")
    worker: str | None = None
    progress: JobProgress = Field(default_factory=JobProgress)
    error: str | None = None
    mlflow_run: str | None = None
    retuned_from: str | None = Field(None, description="Search whose profile lost its speed-up, if that is why.")
    replay: TextReplay | None = Field(
        None, description="Predictions on texts of production, for a search that was re-tuned with such texts."
    )
    drift: DriftVerdict | None = Field(
        None, description="Whether the profile still has its speed-up in production; None if nothing was reported."
    )


class WorkerCard(Document):
    """One worker: GET /v1/workers."""

    name: str
    host: str
    device: str
    queue: str
    job: str | None = None
    silent_seconds: float = Field(description="Seconds since its last sign of life.")
    alive: bool
