"""HTTP on the loopback interface: JSON requests to an engine that we have started, and its Prometheus counters."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any

from tuner.errors import EngineError

HOST = "127.0.0.1"
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(?P<value>[^\s]+)")
"""A line of the Prometheus text format: name, labels, value."""
REQUEST_SECONDS = 600.0


def free_port() -> int:
    """Return a port that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Client:
    """Client of one engine. Proxies of the environment do not apply."""

    port: int
    title: str

    def is_healthy(self) -> bool:
        """Return whether `/health` answers with status 200; a server that loads answers another, or not at all."""
        try:
            return self._ask("GET", "/health", None, seconds=5.0)[0] == 200
        except (OSError, HTTPException):
            return False

    def counters(self) -> dict[str, float]:
        """Return the values of `/metrics` by name, summed over labels."""
        return parse_counters(self._answer("GET", "/metrics", None))

    def post(self, path: str, document: Mapping[str, Any]) -> Any:
        """Post a JSON document and return the JSON of the answer."""
        text = self._answer("POST", path, document)
        try:
            return json.loads(text)
        except ValueError:
            raise EngineError(f"{self.title} answered {path} with what is no JSON: {text[:200]!r}") from None

    def _answer(self, method: str, path: str, document: Mapping[str, Any] | None) -> str:
        try:
            status, text = self._ask(method, path, document, REQUEST_SECONDS)
        except (OSError, HTTPException) as cause:
            raise EngineError(f"{self.title} does not answer {path}: {cause or type(cause).__name__}") from None
        if status != 200:
            raise EngineError(f"{self.title} answered {path} with status {status}: {text[:300]}")
        return text

    def _ask(self, method: str, path: str, document: Mapping[str, Any] | None, seconds: float) -> tuple[int, str]:
        connection = HTTPConnection(HOST, self.port, timeout=seconds)
        try:
            body = None if document is None else json.dumps(document)
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        finally:
            connection.close()


def parse_counters(text: str) -> dict[str, float]:
    """Return the values of the Prometheus text format by name, summed over labels."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if found := SAMPLE.match(line):
            values[found["name"]] = values.get(found["name"], 0.0) + float(found["value"])
    return values
