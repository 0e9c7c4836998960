"""HTTP connections of a server: bounded in number, and drained when the server ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp

LAST_SECONDS = 2
"""Time that answers have to reach their clients when they were ended."""
MAX_CONNECTIONS = 512


def uvicorn_settings(log_level: str) -> dict[str, Any]:
    return {
        "http": "h11",
        "ws": "none",
        "limit_concurrency": MAX_CONNECTIONS,
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
