"""Prompts that are much too long: refused by their beginning, and nobody waits for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decoding.decoder import plain_decoder
from decoding.serving.app import create_app
from decoding.serving.run import ServerLimits, new_service
from decoding.serving.service import SPARE_TOKENS, USUAL_CHARACTERS, Service
from tests.support.tiny import tiny_target, tiny_tokenizer

MAX_LENGTH = 64
FIRST = USUAL_CHARACTERS * (2 * MAX_LENGTH + SPARE_TOKENS)
"""Characters that are tokenised before anything is refused."""


class _Counting:
    """A tokenizer that notes the length of each text; with `held`, it stops in long ones."""

    chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"

    def __init__(self, held: threading.Event | None = None) -> None:
        self._tokenizer = tiny_tokenizer()
        self._tokenizer.chat_template = self.chat_template
        self._held = held
        self.lengths: list[int] = []
        self.decode = self._tokenizer.decode
        self.apply_chat_template = self._tokenizer.apply_chat_template

    def __deepcopy__(self, memo: Any) -> _Counting:
        return self

    def __call__(self, text: str, **settings: Any) -> Any:
        self.lengths.append(len(text))
        if self._held is not None and len(text) > 1000:
            assert self._held.wait(60)
        return self._tokenizer(text, **settings)


def _service(tokenizer: Any) -> Service:
    return new_service(plain_decoder(tiny_target()), tokenizer, "tiny", ServerLimits(2, 8, MAX_LENGTH))


@pytest.fixture
def tokenizer() -> _Counting:
    return _Counting()


@pytest.fixture
def client(tokenizer: _Counting) -> Iterator[TestClient]:
    with TestClient(create_app(_service(tokenizer)), raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize("form", ["texts", "parts"])
def test_only_the_beginning_of_a_prompt_of_megabytes_is_tokenised(
    client: TestClient, tokenizer: _Counting, form: str
) -> None:
    long = "w3 " * 1_000_000
    bodies: dict[str, dict[str, Any]] = {
        "texts": {"prompt": [long[:60_000]] * 60},
        "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": long[:3000]}] * 1000}]},
    }
    path = "/v1/chat/completions" if form == "parts" else "/v1/completions"
    answer = client.post(path, json=bodies[form])
    assert answer.status_code == 400
    assert "the server takes 64 tokens, and the prompt has more than" in answer.json()["error"]["message"]
    assert tokenizer.lengths == [FIRST]


def test_the_first_prompt_that_does_not_fit_ends_a_list(client: TestClient, tokenizer: _Counting) -> None:
    answer = client.post("/v1/completions", json={"prompt": ["w1 " * 70, *["w1"] * 60]})
    assert answer.status_code == 400
    assert "the prompt has 70" in answer.json()["error"]["message"]
    assert len(tokenizer.lengths) == 1


@pytest.mark.parametrize("text", ["x" * 300_000, "w1" + " " * 300_000 + "w2", "w1 " * 20 + "\n" * 100_000])
def test_a_prompt_that_fits_is_never_refused_for_its_characters(client: TestClient, text: str) -> None:
    """An unknown word of any length is one token, and spaces are none."""
    answer = client.post("/v1/completions", json={"prompt": text, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] <= 20


def test_a_prompt_of_many_characters_for_each_token_is_tokenised_as_a_whole() -> None:
    word = "a" * 400
    found = Tokenizer(models.WordLevel({"<unk>": 0, word: 1}, unk_token="<unk>"))
    found.normalizer, found.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=found, unk_token="<unk>")
    with TestClient(create_app(_service(tokenizer))) as client:
        body: dict[str, Any] = {"prompt": f"{word} " * (MAX_LENGTH - 1), "max_tokens": 1}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == MAX_LENGTH - 1
        body["prompt"] += f"{word} "
        assert "the prompt has 64" in client.post("/v1/completions", json=body).json()["error"]["message"]


def test_short_prompts_do_not_wait_for_long_ones() -> None:
    held = threading.Event()
    tokenizer = _Counting(held)
    with TestClient(create_app(_service(tokenizer))) as client:
        answers: list[int] = []

        def ask() -> None:
            answers.append(client.post("/v1/completions", json={"prompt": "w3 " * 100_000}).status_code)

        long = threading.Thread(target=ask)
        long.start()
        try:
            while not tokenizer.lengths:
                assert long.is_alive()
            assert client.post("/v1/completions", json={"prompt": "w3", "max_tokens": 2}).status_code == 200
            assert not answers
        finally:
            held.set()
            long.join(60)
        assert answers == [400]


def test_too_many_messages_are_refused(client: TestClient, tokenizer: _Counting) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "w1"}] * 2049})
    assert answer.status_code == 400
    assert "'messages': array too long. Expected an array with maximum length 2048" in answer.json()["error"]["message"]
    assert not tokenizer.lengths
