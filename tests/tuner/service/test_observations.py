"""Reports of production servers: what is taken, how often, how much is kept, and what is answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from tests.support.drifting import PROFILE, SERVER, SimulatedServer, Traffic
from tests.support.service import until, working
from tuner.drift.contract import MOST_REPORTED, ObservationReport, ObservedRequest, ObservedText, Promised
from tuner.service import observations
from tuner.service.admission import Allowed
from tuner.service.app import MAX_BODY_BYTES, ServiceSettings, create_service
from tuner.service.contract import JobResult
from tuner.service.drift import RetuningPolicy
from tuner.service.jobs import Jobs, open_engine
from tuner.service.observations import ObservationStore
from tuner.service.worker import WorkerSettings

TUNED, PLAIN, QUEUED = "0123456789abcdef", "fedcba9876543210", "00000000000000aa"
PROMISED = Promised(name=PROFILE, speedup=1.5, low=1.4, high=1.6)


def _run(job: str, config: Mapping[str, Any], settings: WorkerSettings, jobs: Jobs) -> JobResult:
    promised = PROMISED if job == TUNED else None
    return JobResult(profile="", claims_speedup=job == TUNED, rows=[], report="", mlflow_run="run", promised=promised)


@pytest.fixture(scope="module")
def tuned_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Jobs, Path]]:
    folder = tmp_path_factory.mktemp("drift")
    jobs = Jobs(f"sqlite:///{folder / 'jobs.db'}")
    with working(folder, jobs, _run):
        for job in (TUNED, PLAIN):
            jobs.submit(job, {"model": "m", "dataset": "d"}, "default")
        until(lambda: all(jobs.find(job).state.is_over for job in (TUNED, PLAIN)))
    jobs.submit(QUEUED, {"model": "m", "dataset": "d"}, "default")
    yield jobs, folder
    jobs.close()


@pytest.fixture(scope="module")
def client(tuned_service: tuple[Jobs, Path]) -> Iterator[TestClient]:
    jobs, folder = tuned_service
    with TestClient(create_service(jobs, ServiceSettings(Allowed([], []), folder))) as client:
        yield client


@pytest.fixture
def taking_texts(tuned_service: tuple[Jobs, Path]) -> Iterator[TestClient]:
    """The same service, started with --accept-texts 3."""
    jobs, folder = tuned_service
    settings = ServiceSettings(Allowed([], []), folder, policy=RetuningPolicy(most_texts=3))
    with TestClient(create_service(jobs, settings)) as client:
        yield client


def _reports(*traffic: Traffic, search: str = TUNED, server: str = SERVER) -> Iterator[dict[str, Any]]:
    """The reports of a server, each of the windows since the one before."""
    simulated = SimulatedServer(None, seed=0, server=server)
    windows = [window.model_dump(mode="json") for part in traffic for _, window in simulated.serve(part)]
    for start in range(0, len(windows), MOST_REPORTED):
        requests = [{"number": start + 1, "prompt_tokens": 30, "new_tokens": 200}]
        found = windows[start : start + MOST_REPORTED]
        yield {"search": search, "server": server, "windows": found, "requests": requests}


def test_reports_become_a_verdict_and_nothing_counts_twice(client: TestClient) -> None:
    path = f"/v1/searches/{TUNED}/observations"
    assert client.get(path).json()["verdict"] == "too little data"
    assert client.get(f"/v1/searches/{TUNED}").json()["drift"] is None
    for report in _reports(Traffic(3000, speedup=1.1)):
        first = client.post("/v1/observations", json=report)
        again = client.post("/v1/observations", json=report)
        assert first.status_code == 200, first.text
        assert again.json() == first.json() == client.get(path).json()
    state = client.get(path).json()
    assert state["verdict"] == "below"
    assert state["posterior"]["high"] < 1.4
    assert state["windows"] + state["plain_windows"] == 3000
    assert (state["requests"], state["prompt_tokens"], state["new_tokens"]) == (3, 30, 200)
    assert client.get(f"/v1/searches/{TUNED}").json()["drift"] == "below"
    listed = {job["id"]: job["drift"] for job in client.get("/v1/searches").json()}
    assert listed == {TUNED: "below", PLAIN: None, QUEUED: None}
    assert 'sdtune_drift{verdict="below"} 1.0' in client.get("/metrics").text


def test_a_profile_that_promises_nothing_is_told_so(client: TestClient) -> None:
    (report,) = _reports(Traffic(10), search=PLAIN)
    assert client.post("/v1/observations", json=report).json()["verdict"] == "nothing promised"


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"search": "0" * 16}, 404),
        ({"search": QUEUED}, 409),
        ({"search": "x"}, 422),
        ({"server": "x"}, 422),
        ({"text": "what somebody asked"}, 422),
        ({"requests": [{"number": 1, "prompt_tokens": 3, "new_tokens": 4, "prompt": "a secret"}]}, 422),
        ({"requests": [{"number": 1, "prompt_tokens": -3, "new_tokens": 4}]}, 422),
        ({"requests": [{"number": 1, "prompt_tokens": 3, "new_tokens": 4}] * (MOST_REPORTED + 1)}, 422),
        ({"windows": [{"number": 1}]}, 422),
    ],
)
def test_what_is_not_a_bounded_report_is_a_problem(client: TestClient, changes: dict[str, Any], status: int) -> None:
    (report,) = _reports(Traffic(1))
    answer = client.post("/v1/observations", json={**report, **changes})
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")


SECRET = 1122334455
"""A token id that no other figure is."""


def _text(number: int, **changes: Any) -> dict[str, Any]:
    return {"number": number, "prompt": [SECRET, number], "continuation": [5, 6, 7], **changes}


def test_texts_are_refused_unless_the_service_was_started_for_them(client: TestClient) -> None:
    (report,) = _reports(Traffic(1), search=PLAIN)
    answer = client.post("/v1/observations", json={**report, "texts": [_text(1)]})
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    assert "--accept-texts" in answer.json()["detail"]
    assert client.get(f"/v1/searches/{PLAIN}/observations").json()["texts"] == 0
    assert client.post("/v1/observations", json={**report, "texts": []}).status_code == 200


def test_the_newest_texts_are_kept_shown_to_nobody_and_deleted(
    taking_texts: TestClient, tuned_service: tuple[Jobs, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    jobs, _ = tuned_service
    numbers = {"search": PLAIN, "server": SERVER, "windows": [], "requests": []}
    for first in (1, 2):  # reports overlap
        report = {**numbers, "texts": [_text(number) for number in range(first, first + 3)]}
        state = taking_texts.post("/v1/observations", json=report)
        assert state.status_code == 200, state.text
    assert state.json()["texts"] == 3
    assert jobs.observations.texts(PLAIN) == [ObservedText(**_text(number)) for number in (2, 3, 4)]
    assert jobs.observations.texts(TUNED) == []
    paths = [f"/v1/searches/{PLAIN}{path}" for path in ("", "/observations", "/result", "/report")]
    shown = [taking_texts.get(path).text for path in (*paths, "/metrics", "/", f"/searches/{PLAIN}", "/v1/searches")]
    assert not any(str(SECRET) in text for text in [state.text, caplog.text, *shown])
    assert "3 texts are kept" in shown[6]
    gone = taking_texts.delete(f"/v1/searches/{PLAIN}/observations")
    assert (gone.status_code, gone.json()["texts"], gone.json()["requests"]) == (200, 0, 0)
    assert jobs.observations.texts(PLAIN) == []
    assert jobs.observations.kept(PLAIN).num_texts == 0
    assert taking_texts.delete(f"/v1/searches/{'0' * 16}/observations").status_code == 404


@pytest.mark.parametrize(
    "texts",
    [
        [_text(1)] * 101,
        [_text(1, prompt=[])],
        [_text(1, continuation=[5])],
        [_text(1, prompt=[SECRET] * 4097)],
        [_text(1, continuation=[SECRET] * 513)],
        [_text(1, prompt=[-1])],
        [_text(1, prompt="what somebody asked")],
        [_text(1, user="somebody")],
    ],
)
def test_what_is_no_bounded_text_is_a_problem_that_does_not_repeat_it(taking_texts: TestClient, texts: Any) -> None:
    (report,) = _reports(Traffic(1))
    answer = taking_texts.post("/v1/observations", json={**report, "texts": texts})
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    assert str(SECRET) not in answer.text
    assert "somebody asked" not in answer.text


def test_errors_of_the_database_do_not_repeat_what_was_to_be_stored(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path / 'o.db'}")
    store = ObservationStore(engine)
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE sdtune_observations"))
    text = ObservedText(**_text(1))
    report = ObservationReport(search=TUNED, server=SERVER, windows=[], requests=[], texts=[text])
    with pytest.raises(sa.exc.OperationalError, match="no such table") as failure:
        store.keep(TUNED, report, most_texts=5)
    assert str(SECRET) not in str(failure.value)
    engine.dispose()


@pytest.mark.parametrize("figure", ["seconds", "ended", "sequences", "tokens"])
def test_figures_that_are_no_numbers_of_a_server_are_refused(client: TestClient, figure: str) -> None:
    (report,) = _reports(Traffic(1))
    for value in (-1, 1e300, None, "NaN"):
        report["windows"][0][figure] = value
        assert client.post("/v1/observations", json=report).status_code == 422


def test_the_longest_report_fits_into_a_body(client: TestClient) -> None:
    (report,) = _reports(Traffic(MOST_REPORTED, sequences=16))
    longest = {"arm": "n" * 300, "accepted_lengths": [100] * 17, "context": 12345.6}
    report["windows"] = [{**window, **longest} for window in report["windows"]]
    report["requests"] = [{"number": n + 1, "prompt_tokens": 10**6, "new_tokens": 10**6} for n in range(MOST_REPORTED)]
    assert len(str(report)) < MAX_BODY_BYTES
    assert client.post("/v1/observations", json={**report, "search": PLAIN}).status_code == 200


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_the_oldest_go_first_and_searches_are_apart(
    database: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'o.db'}" if database == "sqlite" else request.getfixturevalue("postgres_url")
    monkeypatch.setattr(observations, "MOST_WINDOWS", 25)
    monkeypatch.setattr(observations, "MOST_REQUESTS", 2)
    engine = open_engine(url)
    store = ObservationStore(engine)
    windows = [window for _, window in SimulatedServer(None, seed=0).serve(Traffic(60))]
    for start in range(0, 60, 10):
        requests = [ObservedRequest(number=start + 1, prompt_tokens=start, new_tokens=1)]
        found = windows[max(0, start - 5) : start + 10]  # reports overlap
        store.keep("a", ObservationReport(search=TUNED, server=SERVER, windows=found, requests=requests))
    store.keep("b", ObservationReport(search=TUNED, server="b" * 32, windows=windows[:3], requests=[]))
    kept = store.kept("a")
    assert kept.windows == [(SERVER, window) for window in windows[-25:]]
    assert [each.prompt_tokens for each in kept.requests] == [40, 50]
    assert len(store.kept("b").windows) == 3
    assert store.kept("c").windows == []
    with engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM sdtune_observations"))
    engine.dispose()
