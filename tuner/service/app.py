"""The HTTP interface of the tuning service: an application over the jobs of one database. It runs no search itself."""

from __future__ import annotations

import hmac
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Depends, FastAPI, Request, Response
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from tuner.service.admission import JOBS, Allowed, admitted, identity, submitted
from tuner.service.contract import (
    JOB_ID,
    JobResult,
    JobState,
    NoResultError,
    SearchJob,
    SearchRequest,
    ServiceError,
    UnauthorizedError,
    UnavailableError,
    UnknownJobError,
    WorkerCard,
)
from tuner.service.jobs import Jobs
from tuner.service.page import METRICS_TYPE, job_page, jobs_page, metrics_text

MAX_BODY_BYTES = 2**20
PROBLEM = "application/problem+json"

JobId = Annotated[str, InPath(pattern=JOB_ID, description="Id of a search.")]


@dataclass(frozen=True)
class ServiceSettings:
    allowed: Allowed
    folder: Path
    """Folder of the jobs' files, which the workers share."""
    token: str | None = None
    tracking_address: str | None = None
    """Address of MLflow for links, if it is on the web."""
    hosts: Sequence[str] = ("*",)
    """Host names by which clients may address the service: on loopback only its own, so that no web page reaches it by another."""


def create_service(jobs: Jobs, settings: ServiceSettings) -> FastAPI:
    app = FastAPI(
        title="sdtune",
        summary="Searches for the fastest lossless decoding, as jobs.",
        docs_url=None,  # the pages would load scripts from elsewhere
        redoc_url=None,
        openapi_url=None,  # FastAPI's own route would ask for no token
        max_body_size=MAX_BODY_BYTES,
        dependencies=[Depends(_guard(settings.token))],
        responses={
            401: {"description": "No or a wrong token.", "content": {PROBLEM: {}}},
            422: {"description": "A request that is not accepted.", "content": {PROBLEM: {}}},
        },
    )
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(settings.hosts))
    _answer_errors(app)
    _add_searches(app, jobs, settings)
    _add_results(app, jobs, settings)
    _add_pages(app, jobs, settings)
    return app


UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"description": "No such search.", "content": {PROBLEM: {}}}}
CROWDED: dict[int | str, dict[str, Any]] = {
    429: {"description": "The client has too many unfinished searches.", "content": {PROBLEM: {}}}
}
TOO_EARLY: dict[int | str, dict[str, Any]] = {
    **UNKNOWN,
    409: {"description": "The search has no result yet.", "content": {PROBLEM: {}}},
}


def _client(request: Request) -> str:
    """Return what tells clients apart: they share one token, so their address."""
    return request.client.host if request.client is not None else ""


def _add_searches(app: FastAPI, jobs: Jobs, settings: ServiceSettings) -> None:
    most = settings.allowed.limits[JOBS]

    @app.post(
        "/v1/searches",
        status_code=202,
        responses={200: {"model": SearchJob, "description": "Submitted before."}, **CROWDED},
    )
    def submit(body: SearchRequest, request: Request, response: Response) -> SearchJob:
        """Queue a search. Its id is a hash of what decides its result: submitting twice is one job."""
        config = admitted(body, settings.allowed)
        job = identity(config, body.queue)
        if not jobs.submit(job, submitted(config), body.queue, client=_client(request), most=most):
            response.status_code = 200
        return jobs.find(job)

    @app.get("/v1/searches")
    def searches() -> list[SearchJob]:
        """Return the latest hundred searches, the newest first."""
        return jobs.latest()

    @app.get("/v1/searches/{job}", responses=UNKNOWN)
    def search(job: JobId) -> SearchJob:
        """Return a search: its state, what it does, the best trial so far."""
        return jobs.find(job)

    @app.post("/v1/searches/{job}/cancel", responses=UNKNOWN)
    def cancel(job: JobId) -> SearchJob:
        """Stop a search; a running one after its trial."""
        return jobs.cancel(job)

    @app.post("/v1/searches/{job}/resume", responses={**UNKNOWN, **CROWDED})
    def resume(job: JobId, request: Request) -> SearchJob:
        """Queue a cancelled or failed search again. Finished trials and steps are not repeated."""
        return jobs.resume(job, client=_client(request), most=most)

    @app.get("/v1/workers")
    def workers() -> list[WorkerCard]:
        """Return the workers."""
        return jobs.workers.cards()


def _add_results(app: FastAPI, jobs: Jobs, settings: ServiceSettings) -> None:
    def result_of(job: str) -> JobResult:
        found = jobs.result(job)
        if found is None:
            raise NoResultError(f"the search {job} is {jobs.find(job).state}")
        return found

    @app.get("/v1/searches/{job}/result", responses=TOO_EARLY)
    def result(job: JobId) -> JobResult:
        """Return the profile and the final table."""
        return result_of(job)

    @app.get("/v1/searches/{job}/profile", responses=TOO_EARLY, response_class=PlainTextResponse)
    def profile(job: JobId) -> Response:
        """Return the profile as YAML."""
        return Response(result_of(job).profile, media_type="application/yaml")

    @app.get("/v1/searches/{job}/report", responses=TOO_EARLY, response_class=PlainTextResponse)
    def report(job: JobId) -> Response:
        """Return the final tables as text."""
        return PlainTextResponse(result_of(job).report)

    @app.get("/v1/searches/{job}/files/{number}", responses=TOO_EARLY, response_class=FileResponse)
    def file(job: JobId, number: Annotated[int, InPath(ge=0, le=1000)]) -> Response:
        """Return a file that belongs beside the profile, by its place in `files` of the result."""
        files = result_of(job).files
        path = settings.folder / job / files[number] if number < len(files) else None
        if path is None or not path.is_file():
            raise UnknownJobError(f"the search {job} has no file {number}")
        return FileResponse(path)


def _add_pages(app: FastAPI, jobs: Jobs, settings: ServiceSettings) -> None:
    @app.get("/health")
    def health() -> dict[str, str]:
        """Answer if the database answers. Needs no token."""
        jobs.workers.cards()
        return {"status": "ok"}

    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> JSONResponse:
        return JSONResponse(app.openapi())

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:
        """Return counts of searches and workers for Prometheus."""
        return Response(metrics_text(jobs.latest(1000), jobs.workers.cards()), media_type=METRICS_TYPE)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    def overview() -> str:
        return jobs_page(jobs.latest(), jobs.workers.cards())

    @app.get("/searches/{job}", response_class=HTMLResponse, include_in_schema=False)
    def details(job: JobId) -> str:
        found = jobs.find(job)
        finished = found.state is JobState.FINISHED
        return job_page(found, jobs.result(job) if finished else None, settings.tracking_address)


def _guard(token: str | None) -> Any:
    async def check(request: Request) -> None:
        if token is None or request.scope["path"] == "/health":
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "basic":  # what a browser sends: any user, the token as the password
            try:
                given = b64decode(given, validate=True).decode().partition(":")[2]
            except ValueError:
                given = ""
        if kind.lower() not in ("bearer", "basic") or not hmac.compare_digest(given.encode(), token.encode()):
            raise UnauthorizedError("give the token as a bearer token")

    return check


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(ServiceError)
    async def refused(_: Request, error: ServiceError) -> Response:
        return _problem(error.status, error.title, str(error), error.headers)

    @app.exception_handler(sa.exc.SQLAlchemyError)
    async def away(_: Request, error: sa.exc.SQLAlchemyError) -> Response:
        # Its own words may hold an address with a password.
        return await refused(_, UnavailableError("the database of the service does not answer"))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        found = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5])
        return await refused(_, ServiceError(found))

    @app.exception_handler(StarletteHTTPException)
    async def other(_: Request, error: StarletteHTTPException) -> Response:
        return _problem(error.status_code, str(error.detail), "", error.headers)


def _problem(status: int, title: str, detail: str, headers: Mapping[str, str] | None) -> JSONResponse:
    # What is refused may hold halves of surrogate pairs, which no answer can.
    detail = detail.encode(errors="backslashreplace").decode()
    body = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    return JSONResponse(body, status, headers, media_type=PROBLEM)
