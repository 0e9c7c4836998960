"""Names in the Host header: a web page whose own name leads to this machine reads nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from decoding.decoder import plain_decoder
from decoding.serving.app import create_app
from decoding.serving.hosts import HostNameError, host_names
from decoding.serving.run import ServerLimits, new_service
from tests.support.tiny import tiny_target, tiny_tokenizer

LOCAL = {"127.0.0.1", "localhost", "[::1]"}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    service = new_service(plain_decoder(tiny_target()), tiny_tokenizer(), "tiny", ServerLimits(2, 2, 32))
    app = create_app(service, hosts=host_names("127.0.0.1", ["*.example.com"]))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def test_other_names_are_refused_by_an_error_object(client: TestClient) -> None:
    names = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "example.com", "")
    asked = [(name, "/v1/models") for name in names]
    paths = ("/health", "/metrics", "/v1/completions", "/nothing")
    for host, path in [*asked, *(("evil.example", path) for path in paths)]:
        for ask in (client.get, client.post):
            answer = ask(path, headers={"Host": host})
            assert answer.status_code == 400
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert "Host header" in answer.json()["error"]["message"]


def test_own_and_allowed_names_are_answered(client: TestClient) -> None:
    for host in ("127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "api.example.com"):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 200


def test_the_bound_address_and_what_the_operator_allows_are_known_names() -> None:
    assert set(host_names("127.0.0.1")) == LOCAL
    assert set(host_names("127.0.0.5")) == LOCAL | {"127.0.0.5"}
    assert set(host_names("::1")) == LOCAL
    assert set(host_names("0.0.0.0", ["api.example.com"])) == LOCAL | {"0.0.0.0", "api.example.com"}
    assert host_names("0.0.0.0") == ["*"], "clients have a key"
    for wrong in ("api.example.com:8000", "http://api.example.com", "a*b", "", "*.", "a b"):
        with pytest.raises(HostNameError, match="is no host name: give one without a port"):
            host_names("127.0.0.1", [wrong])
