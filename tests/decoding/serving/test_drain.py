"""The end of the server: what is still being answered ends with an error that clients understand."""

from __future__ import annotations

import json
import socket
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
