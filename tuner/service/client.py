"""A client of the service's HTTP interface."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2
from pydantic import TypeAdapter, ValidationError

from decoding.documents.strict_yaml import Document
from decoding.errors import first_line
from decoding.serving.hosts import is_loopback
from tuner.service.contract import JobResult, SearchJob, SearchRequest, ServiceError, UnavailableError, WorkerCard

TIMEOUT_SECONDS = 60.0
WATCH_SECONDS = 1.0
"""Seconds between two looks at a search that is watched."""

T = TypeVar("T")


class ServiceClient:
    """The service at an address. Every method raises `ServiceError`, in one line, if it refuses or does not answer."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.address = address
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            self._http = httpx2.Client(
                base_url=address,
                headers=headers,
                timeout=TIMEOUT_SECONDS,
                trust_env=_may_take_a_proxy(address),
            )
        except (httpx2.InvalidURL, ValueError, ImportError) as cause:
            raise ServiceError(f"cannot reach the service at {address}: {first_line(cause)}") from None

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(self, *failure: object) -> None:
        self._http.close()

    def submit(self, request: SearchRequest) -> SearchJob:
        """Queue a search, or find it if it was submitted before."""
        return self._call(SearchJob, "POST", "/v1/searches", request)

    def searches(self) -> list[SearchJob]:
        return self._call(list[SearchJob], "GET", "/v1/searches")

    def workers(self) -> list[WorkerCard]:
        return self._call(list[WorkerCard], "GET", "/v1/workers")

    def search(self, job: str) -> SearchJob:
        return self._call(SearchJob, "GET", f"/v1/searches/{job}")

    def cancel(self, job: str) -> SearchJob:
        return self._call(SearchJob, "POST", f"/v1/searches/{job}/cancel")

    def resume(self, job: str) -> SearchJob:
        return self._call(SearchJob, "POST", f"/v1/searches/{job}/resume")

    def result(self, job: str) -> JobResult:
        return self._call(JobResult, "GET", f"/v1/searches/{job}/result")

    def file(self, job: str, number: int) -> bytes:
        return self._answer("GET", f"/v1/searches/{job}/files/{number}").content

    def watch(self, job: str) -> Iterator[SearchJob]:
        """Yield a search at each change, until it is over. While the service's database is away, it is waited for."""
        last = None
        while True:
            with suppress(UnavailableError):
                if (now := self.search(job)) != last:
                    yield now
                if now.state.is_over:
                    return
                last = now
            time.sleep(WATCH_SECONDS)

    def _call(self, kind: type[T], method: str, path: str, body: Document | None = None) -> T:
        try:
            return TypeAdapter(kind).validate_json(self._answer(method, path, body).content)
        except ValidationError as cause:
            where = ".".join(map(str, cause.errors()[0]["loc"]))
            raise ServiceError(
                f"{self.address} does not answer as a tuning service of this version ({where}: {cause.errors()[0]['msg']})"
            ) from None

    def _answer(self, method: str, path: str, body: Document | None = None) -> httpx2.Response:
        try:
            answer = self._http.request(method, path, json=None if body is None else body.model_dump(mode="json"))
        except (httpx2.HTTPError, httpx2.InvalidURL) as cause:
            reason = first_line(cause, default="no reason")
            raise ServiceError(f"no answer from the service at {self.address}: {reason}") from None
        if answer.status_code >= 400:
            raise _refusal(answer)
        return answer


def _refusal(answer: httpx2.Response) -> ServiceError:
    kind = UnavailableError if answer.status_code == UnavailableError.status else ServiceError
    try:
        problem = answer.json()
        return kind(f"{problem['title']}: {problem['detail']}")
    except (ValueError, KeyError, TypeError, RecursionError):
        return kind(f"the service answered with status {answer.status_code}")


def _may_take_a_proxy(address: str) -> bool:
    """Return False unless a proxy of the environment sees no more than where the service is: the token is none of its business.

    With https the proxy passes on what it cannot read; with http it would get the token in plain text.
    """
    url = urlsplit(address)
    return url.scheme == "https" and not is_loopback(url.hostname or "")
