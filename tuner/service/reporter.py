"""What a production server has seen, fetched from it and reported to the service.

Windows and requests have numbers and the server an identity, so that a report may be repeated: neither a restart of the server, nor
one of the service, nor one of the reporter makes anything count twice. Texts are reported only if that is asked for, and before the
windows, so that they are there when the verdict falls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import httpx2
from pydantic import ValidationError

from decoding.errors import first_line
from tuner.drift.contract import MOST_TEXTS, DriftState, ObservationReport, Observed, ObservedText
from tuner.service.client import ServiceClient
from tuner.service.contract import ServiceError

TIMEOUT_SECONDS = 30.0
MOST_TOKENS = 100_000
"""Tokens of the texts of one report: of at most eight bytes each, with its comma, so that a report fits into 1 MiB."""


def observed_by(
    address: str,
    key: str | None,
    *,
    texts_after: int | None = None,
    transport: httpx2.BaseTransport | None = None,
) -> Observed:
    """Return what the server of `sdtune serve` at an address has seen lately; `key` is its API key, if it has one.

    With `texts_after`, also the texts with a number above it. Raises `ServiceError` if it does not answer, refuses, or answers
    something else.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with httpx2.Client(base_url=address, headers=headers, timeout=TIMEOUT_SECONDS, transport=transport) as http:
            answer = http.get("/observations", params={} if texts_after is None else {"texts_after": texts_after})
    except httpx2.HTTPError as cause:
        raise ServiceError(
            f"no answer from the server at {address}: {first_line(cause, default='no reason')}"
        ) from None
    if texts_after is not None and answer.status_code == 400:
        raise ServiceError(f"the server at {address} keeps no texts: start it with --keep-texts")
    if answer.status_code != 200:
        raise ServiceError(f"the server at {address} answers with status {answer.status_code}")
    try:
        return Observed.model_validate_json(answer.content)
    except (ValidationError, json.JSONDecodeError):
        raise ServiceError(
            f"the answer of {address} is not what this version of `sdtune serve` has in /observations"
        ) from None


class Reporter:
    """Reports what the server at an address has seen with the profile of a search, its texts only if `with_texts`."""

    def __init__(
        self, client: ServiceClient, job: str, address: str, key: str | None = None, *, with_texts: bool = False
    ) -> None:
        self._client, self._job, self._address, self._key = client, job, address, key
        self._with_texts = with_texts
        self._told: tuple[str, int] | None = None
        """The server, and the number of its latest text that was reported."""

    def report(self) -> DriftState:
        """Report what is there now; return the verdict on the profile. Raises `ServiceError` if one of both does not answer."""
        while (found := self._observed()).texts:  # a server shows some at a time
            for texts in portions(found.texts):
                self._client.report(
                    ObservationReport(search=self._job, server=found.server, windows=[], requests=[], texts=texts)
                )
                self._told = found.server, texts[-1].number
        numbers = {"server": found.server, "windows": found.windows, "requests": found.requests}
        return self._client.report(ObservationReport(search=self._job, **numbers))

    def _observed(self) -> Observed:
        if not self._with_texts:
            return observed_by(self._address, self._key)
        server, number = self._told or ("", 0)
        found = observed_by(self._address, self._key, texts_after=number)
        if server and found.server != server:  # started again: it counts from 1
            return observed_by(self._address, self._key, texts_after=0)
        return found


def portions(texts: Sequence[ObservedText]) -> Iterator[list[ObservedText]]:
    """Yield the texts in reports of at most `MOST_TEXTS` texts and `MOST_TOKENS` tokens."""
    portion: list[ObservedText] = []
    tokens = 0
    for text in texts:
        length = len(text.prompt) + len(text.continuation)
        if portion and (len(portion) == MOST_TEXTS or tokens + length > MOST_TOKENS):
            yield portion
            portion, tokens = [], 0
        portion.append(text)
        tokens += length
    if portion:
        yield portion
