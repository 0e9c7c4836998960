"""Texts that a server keeps: only if it is told to, only greedy ones, not too many, and nowhere but in /observations."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from starlette.testclient import TestClient
from transformers import RepetitionPenaltyLogitsProcessor

from decoding.acceptance import Sampling
from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.rounds import Prefill, Round
from decoding.serving import kept_texts
from decoding.serving.app import create_app
from decoding.serving.kept_texts import KeptTexts
from decoding.serving.observations import Observations
from decoding.serving.run import ServerLimits, new_service
from decoding.serving.waiting_room import Job, RequestEnd, Stopped
from decoding.text import Ending, Shaping
from tests.support.tiny import tiny_target, tiny_tokenizer

KEY = "a key"


def _serve(texts: KeptTexts, request: Request, num_rounds: int = 2, end: RequestEnd = RequestEnd()) -> None:  # noqa: B008 - frozen
    job = Job(request, lambda _: None)
    texts.observe(job, Prefill(5, 0.1))
    for _ in range(num_rounds):
        texts.observe(job, Round((6, 7), 3, 1, 0.1, 0.0))
    texts.observe(job, end)


def test_the_latest_greedy_texts_are_kept_and_no_others() -> None:
    texts = KeptTexts(3)
    for token in range(5):
        _serve(texts, Request([token, 9], Ending(99)), end=RequestEnd(Stopped.CANCELLED if token == 4 else None))
    assert texts.document() == [
        {"number": number, "prompt": [number - 1, 9], "continuation": [5, 6, 7, 6, 7]} for number in (3, 4, 5)
    ]
    assert [each["number"] for each in texts.document(after=4)] == [5]
    _serve(texts, Request([1], Ending(99), Sampling(torch.Generator())))
    _serve(texts, Request([1], Ending(99), shaping=Shaping([RepetitionPenaltyLogitsProcessor(1.5)])))
    _serve(texts, Request([1], Ending(1)), num_rounds=0)
    assert texts.document(after=5) == []
    assert not texts._running, "ended requests are forgotten"


def test_some_texts_are_shown_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_texts, "MOST_SHOWN", 2)
    texts = KeptTexts(5)
    for _ in range(5):
        _serve(texts, Request([1], Ending(99)))
    shown = [[each["number"] for each in texts.document(after=after)] for after in (0, 2, 4, 5)]
    assert shown == [[1, 2], [3, 4], [5], []]


def test_long_texts_are_cut_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_texts, "LONGEST_PROMPT", 4)
    monkeypatch.setattr(kept_texts, "LONGEST_CONTINUATION", 4)
    texts = KeptTexts(9)
    _serve(texts, Request([1] * 4, Ending(99)), num_rounds=9)
    _serve(texts, Request([1] * 5, Ending(99)))
    assert texts.document() == [{"number": 1, "prompt": [1] * 4, "continuation": [5, 6, 7, 6]}]


@pytest.fixture(params=[0, 2], ids=["none kept", "two kept"])
def client(request: pytest.FixtureRequest) -> Iterator[TestClient]:
    decoder = Decoder(tiny_target(eos_token_id=61), LayerSkip.blocks((3, 4)), Fixed(max_tokens=3))
    observations = Observations(texts=KeptTexts(request.param) if request.param else None)
    limits = ServerLimits(num_rows=2, max_waiting=8, max_length=64)
    service = new_service(decoder, tiny_tokenizer(), "tiny", limits, observations)
    with TestClient(create_app(service, api_key=KEY)) as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        yield client


def test_texts_are_shown_to_who_asks_with_the_key_if_the_server_keeps_them(
    client: TestClient, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    caplog.set_level(logging.DEBUG)
    prompt = "w3 w9 w47"
    ids = tiny_tokenizer()(prompt)["input_ids"]
    for number, temperature in enumerate((0, 1, 0, 0)):
        body = {"prompt": prompt, "temperature": temperature, "max_tokens": 4 + number, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
    assert "texts" not in client.get("/observations").json()
    asked = client.get("/observations?texts_after=0")
    if "none" in request.node.callspec.id:
        assert asked.status_code == 400
        assert "--keep-texts" in asked.json()["error"]["message"]
        return
    found = asked.json()["texts"]
    assert [(each["number"], each["prompt"]) for each in found] == [(2, ids), (3, ids)]
    assert [len(each["continuation"]) for each in found] == [6, 7]
    assert client.get("/observations?texts_after=2").json()["texts"] == found[1:]
    assert client.get("/observations?texts_after=-1").status_code == 400
    assert client.get("/observations?texts_after=0", headers={"Authorization": ""}).status_code == 401
    elsewhere = client.get("/metrics").text + client.get("/health").text + caplog.text
    assert "w47" not in elsewhere
    assert str(ids[-1]) + "," not in elsewhere
