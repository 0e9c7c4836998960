"""Requests to the tuning service that no client would send: refused or bounded, never a status of 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import sqlalchemy as sa
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tuner.config import SearchConfig
from tuner.service.admission import Allowed
from tuner.service.app import MAX_BODY_BYTES, ServiceSettings, create_service
from tuner.service.jobs import Jobs

IS_JSON = {"content-type": "application/json"}
JOB = "0123456789abcdef"
QUICK = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("service")
    (folder / "model").mkdir()
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    return folder


@pytest.fixture(scope="module")
def jobs(folder: Path) -> Iterator[Jobs]:
    jobs = Jobs(f"sqlite:///{folder / 'jobs.db'}")
    jobs.submit(JOB, {"model": "m", "dataset": "d"}, "default")
    yield jobs
    jobs.close()


@pytest.fixture(scope="module")
def place(folder: Path) -> ServiceSettings:
    return ServiceSettings(Allowed([str(folder / "model")], [str(folder / "prompts.jsonl")]), folder / "searches")


def _operations(jobs: Jobs, place: ServiceSettings) -> list[Any]:
    schema = schemathesis.openapi.from_asgi("/openapi.json", create_service(jobs, place))
    return [found.ok() for found in schema.get_all_operations()]


def test_no_request_of_the_openapi_document_ends_with_500(jobs: Jobs, place: ServiceSettings) -> None:
    operations = _operations(jobs, place)
    assert len(operations) >= 12
    answered: set[int] = set()
    for operation in operations:

        @QUICK
        @given(case=operation.as_strategy(), known=st.booleans())
        def check(case: Any, known: bool) -> None:
            if known and "job" in case.path_parameters:
                case.path_parameters["job"] = JOB
            status = case.call().status_code
            answered.add(status)
            assert status < 500, case.as_curl_command()

        check()
    assert {200, 404, 422} <= answered


def test_no_configuration_ends_with_500(jobs: Jobs, place: ServiceSettings, folder: Path) -> None:
    known = {"model": str(folder / "model"), "dataset": str(folder / "prompts.jsonl")}
    with TestClient(create_service(jobs, place), raise_server_exceptions=False) as client:

        @settings(QUICK, max_examples=60)
        @given(st.dictionaries(st.sampled_from(sorted(SearchConfig.model_fields)), JSON, max_size=3))
        def check(changes: dict[str, Any]) -> None:
            answer = client.post("/v1/searches", content=json.dumps({"config": {**known, **changes}}), headers=IS_JSON)
            assert answer.status_code in (200, 202, 400, 422), changes

        check()


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "in pieces"])
def test_a_body_of_10_megabytes_is_refused(jobs: Jobs, place: ServiceSettings, declared: bool) -> None:
    body = b"[" * (10 * MAX_BODY_BYTES)
    with TestClient(create_service(jobs, place), raise_server_exceptions=False) as client:
        content = body if declared else iter([body[:MAX_BODY_BYTES]] * 10)
        assert client.post("/v1/searches", content=content).status_code == 413


def test_a_deeply_nested_body_is_refused(jobs: Jobs, place: ServiceSettings) -> None:
    depth = MAX_BODY_BYTES // 4
    body = b'{"config": {"model": ' + b"[" * depth + b"]" * depth + b"}}"
    with TestClient(create_service(jobs, place), raise_server_exceptions=False) as client:
        answer = client.post("/v1/searches", content=body, headers=IS_JSON)
    assert answer.status_code == 400


def test_a_database_that_is_away_is_said(jobs: Jobs, place: ServiceSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(job: str) -> None:
        raise sa.exc.OperationalError("select", {}, Exception("the server closed the connection; password=secret"))

    monkeypatch.setattr(jobs, "find", away)
    with TestClient(create_service(jobs, place), raise_server_exceptions=False) as client:
        answer = client.get(f"/v1/searches/{JOB}")
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
    assert "secret" not in answer.text
    assert answer.headers["retry-after"]
