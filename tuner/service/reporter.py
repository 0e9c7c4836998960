"""What a production server has seen, fetched from it and reported to the service.

Windows and requests have numbers and the server an identity, so that a report may be repeated: neither a restart of the server, nor
one of the service, nor one of the reporter makes anything count twice.
"""

from __future__ import annotations

import json

import httpx2
from pydantic import ValidationError

from decoding.errors import first_line
from tuner.drift.contract import DriftState, ObservationReport, Observed
from tuner.service.client import ServiceClient
from tuner.service.contract import ServiceError

TIMEOUT_SECONDS = 30.0


def observed_by(address: str, key: str | None, *, transport: httpx2.BaseTransport | None = None) -> Observed:
    """Return what the server of `sdtune serve` at an address has seen lately; `key` is its API key, if it has one.

    Raises `ServiceError` if it does not answer, refuses, or answers something else.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with httpx2.Client(base_url=address, headers=headers, timeout=TIMEOUT_SECONDS, transport=transport) as http:
            answer = http.get("/observations")
    except httpx2.HTTPError as cause:
        raise ServiceError(
            f"no answer from the server at {address}: {first_line(cause, default='no reason')}"
        ) from None
    if answer.status_code != 200:
        raise ServiceError(f"the server at {address} answers with status {answer.status_code}")
    try:
        return Observed.model_validate_json(answer.content)
    except (ValidationError, json.JSONDecodeError):
        raise ServiceError(
            f"the answer of {address} is not what this version of `sdtune serve` has in /observations"
        ) from None


def report(client: ServiceClient, job: str, found: Observed) -> DriftState:
    """Report what a server has seen with the profile of a search; return the verdict on that profile."""
    return client.report(ObservationReport(search=job, **dict(found)))
