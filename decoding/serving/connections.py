"""HTTP connections of a server: bounded in number, and closed if they do not send a request or do not take its answer."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

LAST_SECONDS = 2
"""Time that answers have to reach their clients when they were ended."""
MAX_CONNECTIONS = 512
"""Most connections at a time, and no more than half of the files that the process may open."""


class Connection(H11Protocol):
    """A connection that is checked every second; uvicorn itself waits for a request indefinitely.

    Seconds are counted in looks, so that a time in which the process itself stands still is not held against the client.
    """

    look_seconds = 1.0
    request_looks = 10
    """Looks after which a connection is closed that has sent no whole head, or no whole body after its head."""
    body_bytes_per_look = 2**15
    """Bytes of a body that allow one more look."""
    answer_looks = 60
    """Looks after which a connection is closed whose client takes nothing of an answer."""

    # What the latest look found.
    _looks = 0
    _stage: tuple[RequestResponseCycle | None, bool] = (None, True)
    _received = 0
    _stalled_looks = 0
    _unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to look. With too many connections, the one that has waited longest for its request makes room."""
        super().connection_made(transport)
        self.arrived = self.loop.time()
        self._timer = self.loop.call_later(self.look_seconds, self._look)
        limit = max_connections()
        if len(self.connections) > limit:
            waiting = [each for each in self.connections if isinstance(each, Connection) and each.is_waiting]
            if len(waiting) > _spare(limit):  # below that, all others are being answered: uvicorn answers with 503
                longest = min(waiting, key=lambda each: each.arrived)
                longest.transport.abort()
                self.connections.discard(longest)  # now, so that no request is refused for it

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)

    @property
    def is_waiting(self) -> bool:
        """Whether nothing is being answered: the next request, or a part of it, has still to come."""
        if self.transport.is_closing():
            return False
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete or (cycle.more_body and not cycle.response_started)

    def _look(self) -> None:
        if self._is_late() or self._is_stalled():
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(self.look_seconds, self._look)

    def _is_late(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        stage = (cycle, cycle is None or cycle.response_complete)
        if stage != self._stage:
            self._stage, self._looks, self._received, self.arrived = stage, 0, 0, self.loop.time()
        if not self.is_waiting or self.transport.get_write_buffer_size():
            return False
        self._looks += 1
        is_body = cycle is not None and not cycle.response_complete
        return self._looks > self.request_looks + (self._received // self.body_bytes_per_look if is_body else 0)

    def _is_stalled(self) -> bool:
        unsent = self.transport.get_write_buffer_size()
        self._stalled_looks = self._stalled_looks + 1 if unsent and unsent == self._unsent else 0
        self._unsent = unsent
        return self._stalled_looks > self.answer_looks


class OncePerMinute(logging.Filter):
    """Passes a warning that clients can cause at will once a minute; errors of the application always pass."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        message, now = str(record.msg), time.monotonic()
        # asyncio logs a traceback for each connection that it cannot accept because the process has too many open files.
        is_refused_accept = record.name == "asyncio" and "out of system resource" in message
        if record.levelno != logging.WARNING and not is_refused_accept:
            return True
        if is_refused_accept:
            record.msg, record.exc_info, message = "too many open files: connections have to wait", None, "accept"
        if now - self._passed.get(message, -60.0) < 60.0:
            return False
        self._passed[message] = now
        return True


def max_connections() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, max(files // 2, 1))


def _spare(limit: int) -> int:
    """Return how many connections may wait for a request while all others are being answered."""
    return max(limit // 16, 1)


def uvicorn_settings(log_level: str) -> dict[str, Any]:
    """Return settings of uvicorn with which connections are bounded, and the log does not grow with them."""
    limit = max_connections()
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(OncePerMinute())
    return {
        "http": Connection,
        "ws": "none",  # another protocol would take a connection out of the count
        "backlog": max(limit // 8, 16),  # asyncio accepts this many at once, before it closes any
        "limit_concurrency": limit + _spare(limit),
        "log_level": log_level,
        "access_log": False,
    }


class DrainingServer(uvicorn.Server):
    """Calls `end_answers` when the drain is over.

    uvicorn itself would cancel the requests, which clients see as a bare status 500 or as a stream without an end.
    """

    def __init__(self, config: uvicorn.Config, drain_seconds: float, end_answers: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain_seconds, self._end_answers = drain_seconds, end_answers

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._drain_seconds, self._end_answers)
        await super().shutdown(sockets)
        timer.cancel()


def run_server(
    app: ASGIApp,
    *,
    host: str,
    port: int,
    log_level: str,
    drain_seconds: int,
    end_answers: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C. Requests that are being answered then have `drain_seconds` to end.

    After that `end_answers` is called, and what has not ended a moment later is cut off.
    """
    settings = {**uvicorn_settings(log_level), "timeout_graceful_shutdown": drain_seconds + LAST_SECONDS}
    server = DrainingServer(uvicorn.Config(app, host=host, port=port, **settings), drain_seconds, end_answers)
    with suppress(KeyboardInterrupt):  # raised again by uvicorn after its shutdown
        server.run()
    if not server.started:
        raise SystemExit(1)
