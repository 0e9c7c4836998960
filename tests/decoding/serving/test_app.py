"""The HTTP interface, in process: a tiny model, the real application, no network."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import schemathesis
from hypothesis import Phase, given, settings
from starlette.testclient import TestClient

from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip, SuffixDraft
from decoding.serving.app import create_app
from decoding.serving.protocol import CompletionBody
from decoding.serving.run import KEY_VARIABLE, ServerError, ServerLimits, api_key_for, new_service, refuse_busy_address
from decoding.serving.service import Service
from decoding.text import Ending
from tests.support.tiny import tiny_target, tiny_tokenizer

PROMPT = "w3 w9 w4"
EOS = 61
KEY = "a key"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m.content }} {% endfor %}"
)
NO_REQUESTS = [
    b"",
    b"{",
    b"[]",
    b"3",
    b"\xff\xfe",
    b'{"prompt": "\\ud800"}',
    b'{"prompt": ' + b"[" * 2000,
    b'{"temperature": NaN}',
]


@pytest.fixture(scope="module")
def service() -> Service:
    target = tiny_target(eos_token_id=EOS)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    decoder = Decoder(target, LayerSkip.blocks((3, 4)), Fixed(max_tokens=3))
    limits = ServerLimits(num_rows=3, max_waiting=8, max_length=64)
    return new_service(decoder, tokenizer, "tiny", limits, always_draft=True)  # whatever the load of this machine


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[TestClient]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("decoding.serving.app.MAX_BODY_BYTES", 4096)
        app = create_app(service, api_key=KEY)
    with TestClient(app, raise_server_exceptions=False) as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        yield client


def _plain(service: Service, prompt: str, num_tokens: int) -> list[int]:
    """Decode plainly, alone, in this thread: the decoding thread is idle."""
    ids = service.model.tokenizer(prompt)["input_ids"]
    ending = Ending(num_tokens, frozenset([EOS]))
    return list(plain_decoder(service.decoding.batch.decoder.target).generate(Request(ids, ending)).tokens)


def _text(service: Service, tokens: list[int]) -> str:
    return str(service.model.tokenizer.decode(tokens, skip_special_tokens=True))


def _complete(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def _events(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_completion_is_plain_decodings(client: TestClient, service: Service) -> None:
    plain = _plain(service, PROMPT, 12)
    found = _complete(client, max_tokens=12)
    assert found["object"] == "text_completion"
    (choice,) = found["choices"]
    assert choice["text"] == _text(service, plain)
    assert choice["finish_reason"] == ("stop" if plain[-1] == EOS else "length")
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": len(plain), "total_tokens": 3 + len(plain)}
    assert len(_complete(client)["choices"][0]["text"].split()) <= 16


def test_stream_has_the_same_text(client: TestClient, service: Service) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "stream": True}
    events = _events(client.post("/v1/completions", json={**body, "stream_options": {"include_usage": True}}))
    *chunks, last = events
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == _text(service, _plain(service, PROMPT, 12))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert len(chunks) > 2
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert all("usage" not in chunk for chunk in _events(client.post("/v1/completions", json=body)))


def test_each_chunk_has_the_usage_so_far_if_that_is_asked_for(client: TestClient) -> None:
    body = {"prompt": [PROMPT, "w5 w5"], "temperature": 0, "max_tokens": 12, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = _events(client.post("/v1/completions", json={**body, "stream_options": options}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert 0 < counts[0] < 12
    assert counts[-1] == last["usage"]["completion_tokens"]
    assert last["choices"] == []
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {5}
    alone = {"continuous_usage_stats": True}
    assert all(
        "usage" not in chunk
        for chunk in _events(client.post("/v1/completions", json={**body, "stream_options": alone}))
    )


def test_several_prompts_are_several_choices(client: TestClient, service: Service) -> None:
    prompts = ["w3 w9 w4", "w5", "w8 w8 w1 w2"]
    texts = [_text(service, _plain(service, prompt, 9)) for prompt in prompts]
    found = _complete(client, prompt=prompts, max_tokens=9)
    assert [choice["text"] for choice in found["choices"]] == texts
    ids = [service.model.tokenizer(prompt)["input_ids"] for prompt in prompts]
    assert [choice["text"] for choice in _complete(client, prompt=ids, max_tokens=9)["choices"]] == texts
    answer = client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 9, "temperature": 0, "stream": True})
    streamed = ["", "", ""]
    for event in _events(answer):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == texts


def test_stop_strings_end_the_text_before_them(client: TestClient, service: Service) -> None:
    whole = _text(service, _plain(service, PROMPT, 20))
    stop = whole.split()[7]
    expected = whole[: whole.index(stop)]
    found = _complete(client, max_tokens=20, stop=[stop, "never"])
    assert found["choices"][0]["text"] == expected
    assert found["choices"][0]["finish_reason"] == "stop"
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20, "stop": stop, "stream": True}
    assert "".join(e["choices"][0]["text"] for e in _events(client.post("/v1/completions", json=body))) == expected


def test_chat(client: TestClient, service: Service) -> None:
    body: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "w3 w9"}]},
            {"role": "assistant", "content": "w4"},
        ],
        "temperature": 0,
        "max_completion_tokens": 10,
    }
    text = _text(service, _plain(service, "w3 w9 w4", 10))
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
    events = _events(client.post("/v1/chat/completions", json={**body, "stream": True}))
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text


def test_seed_makes_a_sample_reproducible(client: TestClient) -> None:
    texts = [
        _complete(client, max_tokens=12, temperature=1.5, seed=seed, top_p=0.9)["choices"][0]["text"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    free = {_complete(client, max_tokens=12, temperature=1.5)["choices"][0]["text"] for _ in range(4)}
    assert len(free) > 1


def test_the_coldest_samples_and_the_smallest_shares_are_greedy(client: TestClient) -> None:
    greedy = _complete(client, max_tokens=12)["choices"]
    for temperature in (1e-45, 5e-324, 1e-5):
        assert _complete(client, max_tokens=12, temperature=temperature)["choices"] == greedy
    for top_p in (1e-20, 5e-324):
        assert _complete(client, max_tokens=12, temperature=1.0, top_p=top_p)["choices"] == greedy
    assert _complete(client, max_tokens=12, temperature=1e-5, repetition_penalty=0.01)["choices"][0]["text"]


WRONG_COMPLETIONS: list[tuple[Any, str]] = [
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": []}, "prompt"),
    ({}, "Missing required parameter: 'prompt'."),
    ([], "type for body: expected an object, but got an array"),
    ({"prompt": 3}, "'prompt': expected a string or an array; got 3"),
    ({"prompt": None}, "'prompt': expected a string or an array; got null"),
    ({"prompt": {"text": "w1"}}, "'prompt': expected a string or an array; got an object"),
    ({"prompt": [64]}, "has 64 tokens, and none is 64"),
    ({"prompt": [1] * 64}, "do not fit"),
    ({"prompt": [1, -2]}, "'prompt[1]': integer below minimum value. Expected a value >= 0, but got -2"),
    ({"prompt": [1.0]}, "type for 'prompt[0]': expected an integer, but got a decimal"),
    ({"prompt": [True, False]}, "type for 'prompt[0]': expected an integer, but got a boolean"),
    ({"prompt": [[3], ["w1"]]}, "type for 'prompt[1][0]': expected an integer, but got a string"),
    ({"prompt": ["w1", 3]}, "type for 'prompt[1]': expected a string, but got an integer"),
    ({"prompt": [[]]}, "'prompt[0]': array too short. Expected an array with minimum length 1"),
    ({"prompt": [PROMPT] * 65}, "'prompt': array too long. Expected an array with maximum length 64"),
]
WRONG_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 62}, "takes 64 tokens, and the prompt has 3: 62 new ones do not fit"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "type for 'max_tokens': expected an integer, but got a boolean"),
    ({"max_tokens": 3.0}, "type for 'max_tokens': expected an integer, but got a decimal"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "0"}, "type for 'temperature': expected a decimal, but got a string"),
    ({"n": 2}, "Unsupported value: 'n' does not support 2 with this model: only null and 1 are supported."),
    ({"n": True}, "'n' does not support true"),
    ({"best_of": True}, "'best_of' does not support true"),
    ({"logprobs": 3}, "'logprobs' does not support 3"),
    (
        {"presence_penalty": 0.5},
        "'presence_penalty' does not support 0.5 with this model: only null and 0 are supported",
    ),
    ({"echo": True}, "'echo' does not support true"),
    ({"suffix": "x"}, "'suffix': 'x'"),
    ({"repetition_penalty": 1e-300}, "Expected a value >= 0.01, but got 1e-300"),
    ({"seed": 10**3000}, "'seed': integer above maximum value"),
    ({"stop": [""]}, "'stop[0]': string too short"),
    ({"stop": ["a"] * 17}, "'stop': array too long. Expected an array with maximum length 16"),
    ({"stop": ["a", 3]}, "type for 'stop[1]': expected a string, but got an integer"),
    ({"stop": "x" * 257}, "'stop': string too long. Expected a string with maximum length 256"),
    ({"stop": {"a": 1}}, "'stop': expected a string or an array; got an object"),
    ({"stream": "true"}, "type for 'stream'"),
    ({"stream_options": {}}, "'stream_options': it is only allowed when 'stream' is true"),
    ({"stream": True, "stream_options": {"foo": 1}}, "Unknown parameter: 'stream_options.foo'"),
    ({"metadata": "x"}, "type for 'metadata': expected an object, but got a string"),
    ({"model": 3}, "type for 'model': expected a string, but got an integer"),
    ({"max_tokns": 3}, "Unknown parameter: 'max_tokns'."),
    ({f"key{n}": n for n in range(200)}, "Unknown parameter: 'key0'."),
    ({"k" * 3000: 1}, "Unknown parameter: 'kkk"),
]
MESSAGE = {"role": "user", "content": "w1"}
WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": ["w1"]}]}, "type for 'messages[0].content[0]': expected an object"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "'messages[0].content[0].type': 'image_url'. Supported values are: 'text'",
    ),
    ({"messages": [{"role": "system", "content": "x"}]}, "chat template does not take it: no system"),
    *(
        ({"messages": [MESSAGE], name: value}, f"Unsupported value: '{name}' does not support")
        for name, value in {
            "audio": {"voice": "a"},
            "frequency_penalty": 0.5,
            "function_call": "auto",
            "functions": [{}],
            "logit_bias": {"5": 1},
            "logprobs": True,
            "modalities": ["audio"],
            "prediction": {"type": "content", "content": "x"},
            "reasoning_effort": "low",
            "tool_choice": "auto",
            "tools": [{}],
            "top_logprobs": 2,
            "verbosity": "low",
            "web_search_options": {},
        }.items()
    ),
    ({"messages": [MESSAGE], "response_format": {"type": "json_object"}}, "Supported values are: 'text'"),
    ({"messages": [MESSAGE], "chat_template_kwargs": {"chat_template": "x"}}, "cannot set"),
]


def test_wrong_bodies_are_answered_with_a_short_error_object(client: TestClient) -> None:
    completions = [*WRONG_COMPLETIONS, *(({"prompt": PROMPT, **body}, words) for body, words in WRONG_SETTINGS)]
    asked = [("/v1/completions", *each) for each in completions]
    for path, body, words in [*asked, *(("/v1/chat/completions", *each) for each in WRONG_CHATS)]:
        answer = client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert words in error["message"]
        assert len(error["message"]) < 250
        assert "\n" not in error["message"]
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "model": "other"})
    assert answer.status_code == 404
    assert "does not exist" in answer.json()["error"]["message"]


def test_bodies_that_are_no_request(client: TestClient) -> None:
    for content in NO_REQUESTS:
        answer = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]


def test_a_body_that_is_not_declared_as_json_is_refused(client: TestClient) -> None:
    """As a web page could send it without being asked for."""
    answer = client.post("/v1/completions", content=b'{"prompt": "w1"}', headers={"content-type": "text/plain"})
    assert answer.status_code == 400
    assert "expected an object, but got one without the content type application/json" in answer.text


def test_long_bodies_are_refused_before_they_are_read(client: TestClient) -> None:
    def parts() -> Iterator[bytes]:
        yield from [b'{"prompt": "', *[b"w1 " * 100] * 20, b'"}']

    for content in (b'{"prompt": "%s"}' % (b"w1 " * 2000), parts()):
        answer = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 413
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "body_too_long")
        assert "is longer than" in error["message"]


def test_other_paths(client: TestClient) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert card["id"] == "tiny"
    assert card["max_model_len"] == 64
    assert client.get("/v1/models/tiny").json() == card
    assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert client.get("/health").status_code == 200
    for path in ("/", "/v1/embeddings", "/docs"):
        assert client.get(path).json()["error"]["type"] == "invalid_request_error"
    assert client.get("/v1/completions").status_code == 405


def test_no_request_of_the_openapi_document_ends_with_500(client: TestClient) -> None:
    schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {each.path for each in operations} >= {"/v1/completions", "/v1/chat/completions", "/v1/models"}
    answered: set[int] = set()
    for operation in operations:

        @settings(max_examples=20, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            sent = case.as_transport_kwargs(base_url="http://testserver")
            status = client.request(sent["method"], sent["url"], json=sent.get("json")).status_code
            answered.add(status)
            assert status < 500, sent

        check()
    assert {200, 400} <= answered


def test_openais_own_client_gets_all_that_is_offered(client: TestClient, service: Service) -> None:
    api = openai.OpenAI(api_key=KEY, base_url="http://testserver/v1", http_client=client, max_retries=0)
    text = _text(service, _plain(service, PROMPT, 12))
    assert [each.id for each in api.models.list()] == ["tiny"]
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    whole = api.completions.create(**asked)
    assert (whole.choices[0].text, whole.usage and whole.usage.completion_tokens) == (text, 12)
    *chunks, last = api.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert "".join(each.choices[0].text for each in chunks) == text
    assert last.usage is not None
    stopped = api.completions.create(**asked, stop=text.split()[3])
    assert text.startswith(stopped.choices[0].text)
    assert stopped.choices[0].finish_reason == "stop"
    sampled = [api.completions.create(**{**asked, "temperature": 1}, seed=7).choices[0].text for _ in range(2)]
    assert sampled[0] == sampled[1]
    said: list[Any] = [{"role": "user", "content": "w1 w2"}]
    for _ in range(2):  # as a conversation goes on: with the answer as the client has it
        chat = api.chat.completions.create(model="tiny", messages=said, max_tokens=4)
        assert chat.choices[0].message.role == "assistant"
        said += [chat.choices[0].message.model_dump(), {"role": "user", "content": "w3"}]
    with pytest.raises(openai.BadRequestError, match="only null and 1 are supported"):
        api.completions.create(**asked, n=2)
    with pytest.raises(openai.NotFoundError, match="other"):
        api.completions.create(**{**asked, "model": "other"})


def test_wrong_key(client: TestClient) -> None:
    for sent in (None, "Bearer wrong", KEY, "Bearer \u00e9"):
        headers = {"Authorization": "" if sent is None else sent.encode()}
        answer = client.post("/v1/completions", json={"prompt": PROMPT}, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"


def test_metrics_have_vllms_names(client: TestClient, service: Service) -> None:
    def read() -> dict[str, float]:
        lines = client.get("/metrics").text.splitlines()
        return {name: float(number) for name, number in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    before = read()
    _complete(client, max_tokens=12)
    after = read()

    def grown(name: str, labels: str = "") -> float:
        key = f'vllm:{name}{{model_name="tiny"{labels}}}'
        return after.get(key, 0) - before.get(key, 0)

    assert grown("prompt_tokens_total") == 3
    assert grown("generation_tokens_total") == 12
    drafted, accepted = grown("spec_decode_num_draft_tokens_total"), grown("spec_decode_num_accepted_tokens_total")
    assert 0 < grown("spec_decode_num_drafts_total") <= drafted
    positions = [grown("spec_decode_num_accepted_tokens_per_pos_total", f',position="{place}"') for place in range(3)]
    assert sum(positions) == accepted <= drafted
    assert positions == sorted(positions, reverse=True)
    assert after['vllm:num_requests_running{model_name="tiny"}'] == 0
    assert grown("time_to_first_token_seconds_count") == 1


def test_a_key_is_needed_beyond_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert [api_key_for(host) for host in ("127.0.0.1", "::1", "localhost")] == [None] * 3
    for host in ("0.0.0.0", "::", "example.org"):
        with pytest.raises(ServerError, match=KEY_VARIABLE):
            api_key_for(host)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert api_key_for("0.0.0.0") == KEY


def test_an_address_that_is_taken_is_refused_by_its_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"cannot listen on 127.0.0.1, port {port} .*--port"):
            refuse_busy_address("127.0.0.1", port)
    refuse_busy_address("127.0.0.1", port)
    with pytest.raises(ServerError, match=r"cannot listen on 192\.0\.2\.1"):
        refuse_busy_address("192.0.2.1", port)  # an address of documentation, which no machine has


def _num_accepted(client: TestClient) -> float:
    name = "vllm:spec_decode_num_accepted_tokens_total"
    (line,) = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name)]
    return float(line.rsplit(" ", 1)[1])


def test_drafts_copy_from_the_earlier_answers_of_the_same_user_alone(service: Service) -> None:
    target = service.decoding.batch.decoder.target
    decoder = Decoder(target, SuffixDraft(min_match=2), Fixed(max_tokens=8))
    tokenizer, limits = service.model.tokenizer, ServerLimits(num_rows=2, max_waiting=8, max_length=64)
    remembering = new_service(decoder, tokenizer, "tiny", limits, always_draft=True, history=40)
    with TestClient(create_app(remembering)) as client:

        def accepted(**body: Any) -> float:
            before = _num_accepted(client)
            text = _complete(client, max_tokens=24, **body)["choices"][0]["text"]
            assert text == _text(service, _plain(service, PROMPT, 24))
            return _num_accepted(client) - before

        first, again, of_other = accepted(user="a"), accepted(user="a"), accepted(user="b")
        assert first == of_other < again
        assert accepted() == first, "requests without a user are those of one more"
    assert new_service(decoder, tokenizer, "tiny", limits).request(CompletionBody(prompt=PROMPT), [1]).history is None
