"""The end of the server: what is still being answered ends with an error that clients understand."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import httpx2
import pytest
import uvicorn

from decoding.decoder import plain_decoder
from decoding.serving.app import create_app
from decoding.serving.connections import LAST_SECONDS, DrainingServer, uvicorn_settings
from decoding.serving.run import ServerLimits, new_service
from tests.support.tiny import tiny_target, tiny_tokenizer

WITHIN_A_PASS = """
import signal, sys, time, torch
from decoding.decoder import plain_decoder
from decoding.serving.run import ServerLimits, new_service, serve
from tests.support.tiny import tiny_target, tiny_tokenizer

service = new_service(plain_decoder(tiny_target()), tiny_tokenizer(), "tiny", ServerLimits(2, 8, 64))
batch = service.decoding.batch
advance, square = batch.advance, torch.eye(1000)

def long_pass():
    if len(service.decoding.room):
        print("within a pass", flush=True)
        end = time.monotonic() + 120
        while time.monotonic() < end:
            square @ square
    return advance()

def interrupt(*_):
    raise KeyboardInterrupt

batch.advance = long_pass
signal.signal(signal.SIGTERM, interrupt)  # as the command line does
print("ready", flush=True)
serve(service, host="127.0.0.1", port=int(sys.argv[1]), api_key=None, hosts=["*"], drain_seconds=0)
"""
BODY: dict[str, Any] = {"prompt": "w3 w9 w4", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def test_what_is_not_ended_when_the_drain_is_over_gets_an_error_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the decoding thread is within a long pass, and for requests that wait."""
    service = new_service(plain_decoder(tiny_target()), tiny_tokenizer(), "tiny", ServerLimits(3, 8, 64))
    advance, passes, stuck = service.decoding.batch.advance, iter(range(4)), threading.Event()

    def few_passes() -> bool:
        if next(passes, None) is None:
            stuck.wait(60)
        return advance()

    monkeypatch.setattr(service.decoding.batch, "advance", few_passes)
    settings = {**uvicorn_settings("error"), "timeout_graceful_shutdown": 1 + LAST_SECONDS}
    server = DrainingServer(uvicorn.Config(create_app(service), **settings), 1, service.end_answers)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    found: dict[str, list[httpx2.Response]] = {"at once": [], "streamed": []}
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"

    def ask(kind: str, prompts: Any) -> None:
        body = {**BODY, "prompt": prompts, "stream": kind == "streamed"}
        found[kind].append(httpx2.post(url, json=body, timeout=60))

    while not server.started:
        time.sleep(0.01)
    askers = [threading.Thread(target=ask, args=(kind, "w3 w9 w4")) for kind in found for _ in range(3)]
    askers.append(threading.Thread(target=ask, args=("streamed", ["w1", "w2"])))
    for asker in askers:
        asker.start()
    try:
        end = time.monotonic() + 60
        while len(service._answers) < len(askers) + 1:
            assert time.monotonic() < end
            time.sleep(0.01)
        server.should_exit = True
        for asker in askers:
            asker.join(60)
        thread.join(60)
        assert not thread.is_alive(), "the server ends without waiting for the pass"
    finally:
        stuck.set()
        listener.close()
    assert [answer.status_code for answer in found["at once"]] == [503] * 3
    for answer in found["at once"]:
        error = answer.json()["error"]
        assert (error["type"], error["message"]) == ("server_error", "the server is shutting down")
    assert len(found["streamed"]) == 4
    for answer in found["streamed"]:
        *_, error, done, rest = answer.text.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["message"] == "the server is shutting down"
        assert (done, rest) == ("data: [DONE]", "")
    assert not service._answers


def test_a_process_that_ends_within_a_pass_ends_well() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-c", WITHIN_A_PASS, str(port)]
    answers: list[httpx2.Response] = []

    def ask() -> None:
        answers.append(httpx2.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY, timeout=60))

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            end = time.monotonic() + 60
            while True:
                with socket.socket() as connection:
                    if connection.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert time.monotonic() < end
                time.sleep(0.05)
            asker = threading.Thread(target=ask)
            asker.start()
            assert process.stdout.readline() == "within a pass\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            asker.join(60)
        finally:
            process.kill()
    assert [answer.status_code for answer in answers] == [503]
