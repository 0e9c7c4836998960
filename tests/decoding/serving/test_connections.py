"""Connections that send nothing, or not all, beside clients that ask and read."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from decoding.serving import connections
from decoding.serving.connections import Connection, OncePerMinute
from tests.support.service import listening

Connect = Callable[[bytes], socket.socket]
LIMIT = 8
dropped = threading.Event()
"""Set when nobody reads the endless stream any more."""


def new_app() -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @app.post("/body")
    async def body(body: dict[str, Any]) -> dict[str, Any]:
        return body

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def lines() -> AsyncIterator[str]:
            for number in range(4):
                yield f"{number}\n"
                await asyncio.sleep(0.3)

        return StreamingResponse(lines())

    @app.get("/endless")
    async def endless() -> StreamingResponse:
        async def zeros() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(2**16)
                    await asyncio.sleep(0)  # a client that is gone is noticed between two parts only
            finally:
                dropped.set()

        return StreamingResponse(zeros())

    return app


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that is as impatient as a test."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", LIMIT)
    monkeypatch.setattr(Connection, "look_seconds", 0.05)
    with listening(new_app()) as url:
        yield url


@pytest.fixture
def connect(address: str) -> Iterator[Connect]:
    with ExitStack() as stack:

        def new(begin: bytes) -> socket.socket:
            made = stack.enter_context(socket.create_connection((urlsplit(address).hostname, urlsplit(address).port)))
            made.settimeout(60)
            made.sendall(begin)
            return made

        yield new


def is_closed_by_the_server(made: socket.socket) -> bool:
    """Wait for the end of a connection, which may be a reset; time out if there is none."""
    try:
        while made.recv(2**16):
            pass
    except ConnectionError:
        pass
    return True


def is_closed_while_it_sends(made: socket.socket, part: bytes) -> bool:
    end = time.monotonic() + 60
    try:
        while time.monotonic() < end:
            made.sendall(part)
            time.sleep(0.02)
    except ConnectionError:
        return True
    return False


HEAD = b"POST /body HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\nContent-Type: application/json\r\n\r\n"
WHOLE = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(WHOLE[:-2], id="half a head"),
        pytest.param(HEAD + b"x" * 99, id="half a body"),
        pytest.param(
            HEAD.replace(b"Content-Length: 100", b"Transfer-Encoding: chunked") + b"4\r\nabcd\r\n", id="half the chunks"
        ),
        pytest.param(WHOLE, id="idle"),
        pytest.param(WHOLE + HEAD, id="idle, no body"),
        pytest.param(WHOLE[:-2] + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n", id="an upgrade"),
    ],
)
def test_a_connection_without_a_whole_request_is_closed(connect: Connect, begin: bytes) -> None:
    assert is_closed_by_the_server(connect(begin))


@pytest.mark.parametrize("begin", [b"", WHOLE[:-2] + b"X-Long: ", HEAD.replace(b"100", b"1000")])
def test_a_byte_now_and_then_does_not_help(connect: Connect, begin: bytes) -> None:
    assert is_closed_while_it_sends(connect(begin), b"x")


def test_what_follows_an_answer_that_did_not_wait_for_it_is_cut(connect: Connect) -> None:
    made = connect(HEAD.replace(b"/body", b"/nowhere").replace(b"100", b"100000000000"))
    assert is_closed_while_it_sends(made, bytes(2**12))


def test_an_answer_that_nobody_takes_is_dropped(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "answer_looks", 4)
    dropped.clear()
    connect(WHOLE.replace(b"/health", b"/endless"))
    assert dropped.wait(60)


def test_streams_and_bodies_that_take_longer_than_a_request_may_are_left_alone(address: str) -> None:
    def body() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 2**16
            time.sleep(0.06)
        yield b"{}"

    with httpx2.Client(base_url=address, timeout=60) as client:
        assert client.get("/stream").text == "0\n1\n2\n3\n"
        headers = {"Content-Length": str(20 * 2**16 + 2), "Content-Type": "application/json"}
        assert client.post("/body", content=body(), headers=headers).text == "{}"


def test_health_answers_beside_more_silent_connections_than_there_may_be(address: str, connect: Connect) -> None:
    silent = [connect(begin) for begin in (b"", b"G", HEAD, WHOLE) for _ in range(LIMIT)]
    assert httpx2.get(f"{address}/health", timeout=60).status_code == 200
    assert all(map(is_closed_by_the_server, silent))


def test_connections_that_are_answered_make_no_room(
    address: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "look_seconds", 60.0)
    streams = [connect(WHOLE.replace(b"/health", b"/stream").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))]
    assert streams[0].recv(16)
    silent = [connect(b"") for _ in range(2 * LIMIT)]
    assert httpx2.get(f"{address}/health", timeout=60).status_code == 200
    answer = b""
    while part := streams[0].recv(2**10):
        answer += part
    assert answer.endswith(b"0\r\n\r\n")
    del silent


def test_what_clients_cause_at_will_is_logged_once_a_minute(
    connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
    caplog.set_level(logging.WARNING)
    upgrade = WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n")
    for begin in (b"no HTTP\r\n\r\n", upgrade, HEAD, b"G"):
        assert all(is_closed_by_the_server(connect(begin)) for _ in range(4))
    assert len(caplog.messages) == len(set(caplog.messages)) <= 3


def test_errors_of_the_application_are_logged_each_time() -> None:
    record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "Exception in ASGI application\n", None, None)
    once = OncePerMinute()
    assert once.filter(record)
    assert once.filter(record)


SERVER = """
import resource, socket, sys
import uvicorn
from decoding.serving.connections import Connection, uvicorn_settings
from tests.decoding.serving.test_connections import new_app

app = new_app()
Connection.look_seconds = 0.1
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, **uvicorn_settings("info"))).run(sockets=[listener])
"""


def test_more_connections_than_the_process_may_open_files() -> None:
    command = [sys.executable, "-c", SERVER, "14"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server,
        ExitStack() as stack,
    ):
        stack.callback(server.kill)
        assert server.stdout is not None
        port = int(server.stdout.readline())
        for _ in range(30):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        assert httpx2.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 200
        server.terminate()
        _, log = server.communicate(timeout=60)
    assert "Traceback" not in log
    assert len(log.splitlines()) < 12, log
