"""The documents of the service: what a client sends and what it gets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from pydantic import Field, field_validator

from decoding.documents.strict_yaml import Document
from decoding.errors import SdtuneError

DEFAULT_QUEUE = "default"
JOB_ID = r"^[0-9a-f]{16}$"
"""Pattern of the id of a search."""


class ServiceError(SdtuneError):
    """A request that the service refuses, and the answer by RFC 9457: status, title, headers."""

    status = 422
    title = "Not accepted"
    headers: Mapping[str, str] = MappingProxyType({})


class UnknownJobError(ServiceError):
    """A job, or a file of one, that does not exist."""

    status = 404
    title = "Not found"


class UnauthorizedError(ServiceError):
    status = 401
    title = "Unauthorized"
    headers = MappingProxyType({"WWW-Authenticate": "Basic"})


class UnavailableError(ServiceError):
    status = 503
    title = "Unavailable"
    headers = MappingProxyType({"Retry-After": "10"})


class JobState(StrEnum):
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
    status = 409
    title = "No result yet"


class TooManyJobsError(ServiceError):
    """A client with as many unfinished searches as the operator allows."""

    status = 429
    title = "Too many searches"
    headers = MappingProxyType({"Retry-After": "60"})


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

    @field_validator("config")
    @classmethod
    def _can_be_stored(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Refuse what JSON by the standard and UTF-8 do not hold, wherever it is: databases and answers do not either."""
        try:
            json.dumps(config, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            raise ValueError("holds half of a surrogate pair, which is no character") from None
        except RecursionError:
            raise ValueError("is nested too deeply") from None
        except ValueError:
            raise ValueError("holds a number that is not finite") from None
        return config


class JobProgress(Document):
    """What a running search said last."""

    stage: str = ""
    done: int = 0
    total: int | None = None
    trials: int = 0
    best_speedup: float | None = Field(None, description="Of the best trial, on tuning prompts: no result.")
    best_draft: str | None = None
    lines: list[str] = Field(default_factory=list, description="The latest lines of its progress, trials among them.")


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
    verdict: str | None = Field(
        None,
        description="Of a finished search: the speed-up on held-out prompts with its interval, or `decode plainly`.",
    )
    error: str | None = None
    mlflow_run: str | None = None


class WorkerCard(Document):
    """One worker: GET /v1/workers."""

    name: str
    host: str
    device: str
    queue: str
    job: str | None = None
    silent_seconds: float = Field(description="Seconds since its last sign of life.")
    alive: bool
