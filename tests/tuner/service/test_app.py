"""The HTTP interface over a queue that no worker serves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tuner.cli.jobs import _line
from tuner.service.admission import Allowed, limits_of
from tuner.service.app import MAX_BODY_BYTES, ServiceSettings, create_service
from tuner.service.contract import JobProgress, JobState, SearchJob
from tuner.service.jobs import Jobs
from tuner.service.page import jobs_page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("service")
    for name in ("models/a", "models/b", "secret"):
        (folder / name).mkdir(parents=True)
    (folder / "models/link").symlink_to(folder / "secret")
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    return folder


@pytest.fixture(scope="module")
def jobs(folder: Path) -> Iterator[Jobs]:
    jobs = Jobs(f"sqlite:///{folder / 'jobs.db'}")
    yield jobs
    jobs.close()


@pytest.fixture(scope="module")
def settings(folder: Path) -> ServiceSettings:
    allowed = Allowed([str(folder / "models"), "org/named"], [str(folder / "prompts.jsonl")])
    return ServiceSettings(allowed, folder / "searches")


@pytest.fixture(scope="module")
def client(jobs: Jobs, settings: ServiceSettings) -> Iterator[TestClient]:
    with TestClient(create_service(jobs, settings), raise_server_exceptions=False) as client:
        yield client


def _body(folder: Path, **config: Any) -> dict[str, Any]:
    known = {"model": str(folder / "models/a"), "dataset": str(folder / "prompts.jsonl")}
    return {"config": {**known, **config}}


def test_submitting_twice_is_one_job_and_other_settings_are_another(client: TestClient, folder: Path) -> None:
    first = client.post("/v1/searches", json=_body(folder, seed=1))
    again = client.post("/v1/searches", json=_body(folder, seed=1, trials=None))
    other = client.post("/v1/searches", json=_body(folder, seed=2))
    assert [first.status_code, again.status_code, other.status_code] == [202, 200, 202]
    assert first.json() == again.json()
    assert first.json()["state"] == "queued"
    assert other.json()["id"] != (job := first.json()["id"])
    assert client.get(f"/v1/searches/{job}").json() == first.json()
    assert {job, other.json()["id"]} <= {each["id"] for each in client.get("/v1/searches").json()}


def test_of_equal_submissions_at_once_one_is_new(tmp_path: Path, folder: Path) -> None:
    jobs = Jobs(f"sqlite:///{tmp_path / 'jobs.db'}")
    given = [jobs.submit for _ in range(40)]
    with ThreadPoolExecutor(len(given)) as pool:
        asked = [pool.submit(each, "0" * 16, {"model": "m", "dataset": "d"}, "default") for each in given]
        assert sorted(each.result() for each in asked) == [False] * 39 + [True]
    jobs.close()


def test_a_client_has_a_limited_number_of_unfinished_searches(
    tmp_path: Path, settings: ServiceSettings, folder: Path
) -> None:
    allowed = replace(settings.allowed, limits=limits_of(["jobs=2"]))
    jobs = Jobs(f"sqlite:///{tmp_path / 'jobs.db'}")
    with TestClient(create_service(jobs, replace(settings, allowed=allowed))) as client:
        first, second, third = (client.post("/v1/searches", json=_body(folder, seed=seed)) for seed in range(3))
        assert [first.status_code, second.status_code, third.status_code] == [202, 202, 429]
        assert third.headers["content-type"] == "application/problem+json"
        assert "2 searches of this client are not finished, and 2 may be" in third.json()["detail"]
        assert client.post("/v1/searches", json=_body(folder, seed=0)).status_code == 200  # no further one
        job = first.json()["id"]
        client.post(f"/v1/searches/{job}/cancel")
        assert client.post("/v1/searches", json=_body(folder, seed=2)).status_code == 202
        assert client.post(f"/v1/searches/{job}/resume").status_code == 429
    jobs.close()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model": "org/other"}, "model: 'org/other' is not on the list"),
        ({"model": "{folder}/models/link"}, "is not on the list"),
        ({"distillation": {"training_dataset": "/etc/passwd"}}, "dataset: '/etc/passwd' is not on the list"),
        ({"out": "/etc/passwd"}, "out: the service and its workers decide this"),
        ({"storage": "sqlite:///x", "heads": "x"}, "heads, storage: the service and its workers decide this"),
        ({"trust_remote_code": True}, "trust_remote_code"),
    ],
)
def test_what_is_not_accepted_is_a_problem_in_one_line(
    client: TestClient, folder: Path, config: dict[str, Any], why: str
) -> None:
    body = json.loads(json.dumps(_body(folder, **config)).replace("{folder}", str(folder)))
    answer = client.post("/v1/searches", json=body)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert why in answer.json()["detail"]
    assert "\n" not in answer.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/searches", b"{", 422),
        ("GET", "/v1/searches/0123456789abcdef", b"", 404),
        ("GET", "/v1/searches/..%2F..", b"", 404),
        ("GET", "/v1/searches/x", b"", 422),
        ("DELETE", "/v1/searches", b"", 405),
    ],
)
def test_malformed_requests_are_problems(
    client: TestClient, method: str, path: str, content: bytes, status: int
) -> None:
    answer = client.request(method, path, content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")


def test_a_large_body_is_refused(client: TestClient) -> None:
    answer = client.post("/v1/searches", content=b" " * (MAX_BODY_BYTES + 1))
    assert answer.status_code == 413


def test_a_queued_search_is_cancelled_and_resumed(client: TestClient, jobs: Jobs, folder: Path) -> None:
    job = client.post("/v1/searches", json=_body(folder, seed=4)).json()["id"]
    jobs.note_progress(job, JobProgress(stage="joint", trials=3, best_speedup=1.5, best_draft="skip"))
    assert client.get(f"/v1/searches/{job}").json()["progress"]["best_speedup"] == 1.5
    for path in ("result", "profile", "report", "files/0"):
        assert client.get(f"/v1/searches/{job}/{path}").status_code == 409
    assert client.post(f"/v1/searches/{job}/cancel").json()["state"] == "cancelled"
    assert jobs.is_cancelled(job)
    assert client.post(f"/v1/searches/{job}/resume").json()["state"] == "queued"
    page = client.get("/").text
    assert f"/searches/{job}" in page
    assert "1.50x" not in page, "a figure of tuning prompts is shown while the search runs only"
    assert "joint" in client.get(f"/searches/{job}").text


def test_the_list_shows_the_verdict_of_a_finished_search_and_the_best_trial_of_a_running_one() -> None:
    progress = JobProgress(stage="joint", trials=3, best_speedup=1.79)
    facts = {"id": "0" * 16, "queue": "q", "model": "m", "dataset": "d", "created_seconds": 0.0, "progress": progress}
    running = SearchJob(**facts, state=JobState.RUNNING)
    finished = SearchJob(**facts, state=JobState.FINISHED, verdict="decode plainly")
    failed = SearchJob(**facts, state=JobState.FAILED)
    for job, shown in ((running, "best on tuning prompts 1.79x"), (finished, "decode plainly"), (failed, "")):
        assert ("1.79" in _line(job)) == ("1.79" in jobs_page([job], [])) == ("1.79" in shown)
        assert shown in _line(job)
    assert "1.79x best on tuning prompts" in jobs_page([running], [])
    assert "decode plainly" in jobs_page([finished], [])


def test_what_a_page_shows_is_escaped(client: TestClient, jobs: Jobs, folder: Path) -> None:
    job = client.post("/v1/searches", json=_body(folder, seed=5)).json()["id"]
    jobs.note_progress(job, JobProgress(lines=["<script>alert(1)</script>"]))
    assert "<script>" not in client.get(f"/searches/{job}").text


def test_with_a_token_nothing_but_health_answers_without(jobs: Jobs, settings: ServiceSettings, folder: Path) -> None:
    guarded = ServiceSettings(settings.allowed, settings.folder, token="secret", hosts=("testserver",))
    with TestClient(create_service(jobs, guarded)) as client:
        assert client.get("/health").status_code == 200
        for path in ("/", "/v1/searches", "/v1/workers", "/metrics", "/openapi.json"):
            assert client.get(path).status_code == 401, path
            assert client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401, path
        assert client.get("/v1/searches", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert client.get("/", auth=("anyone", "secret")).status_code == 200
        assert client.get("/health", headers={"Host": "elsewhere.example"}).status_code == 400


def test_metrics_count_searches_and_workers(client: TestClient, jobs: Jobs) -> None:
    text = client.get("/metrics").text
    assert 'sdtune_searches{state="queued"}' in text
    assert 'sdtune_searches{state="failed"} 0.0' in text
