"""A reporter between a production server and the service, each of which may be started again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from decoding.arms.windows import TimedWindow
from decoding.decode import Request as DecodingRequest
from decoding.rounds import Prefill, Round
from decoding.serving import kept_texts
from decoding.serving.kept_texts import KeptTexts
from decoding.serving.observations import Observations
from decoding.serving.waiting_room import Job, RequestEnd
from decoding.text import Ending
from tests.support.service import listening, serving, until, working
from tuner.drift.contract import (
    LONGEST_CONTINUATION,
    LONGEST_PROMPT,
    ObservationReport,
    ObservedText,
    Promised,
)
from tuner.service.app import MAX_BODY_BYTES
from tuner.service.contract import JobResult
from tuner.service.drift import RetuningPolicy
from tuner.service.jobs import Jobs
from tuner.service.observations import ObservationStore
from tuner.service.reporter import portions
from tuner.service.worker import WorkerSettings

JOB = "0123456789abcdef"
PROMISED = Promised(name="tuned", speedup=1.5, low=1.4, high=1.6)


def _run(job: str, config: Mapping[str, Any], settings: WorkerSettings, jobs: Jobs) -> JobResult:
    return JobResult(profile="", claims_speedup=True, rows=[], report="", mlflow_run="run", promised=PROMISED)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(f"sqlite:///{tmp_path / 'jobs.db'}")
    with working(tmp_path, jobs, _run):
        jobs.submit(JOB, {"model": "m", "dataset": "d"}, "default")
        until(lambda: jobs.find(JOB).state.is_over)
    yield jobs
    jobs.close()


class Production:
    """A server in production that has decoded nothing yet."""

    def __init__(self) -> None:
        self.seen = Observations()
        self.app = FastAPI()
        self.keys: list[str] = []

        @self.app.get("/observations")
        def observations(request: Request, texts_after: int | None = None) -> Any:
            self.keys.append(request.headers.get("authorization", ""))
            if texts_after is None:
                return self.seen.document()
            if self.seen.texts is None:
                return JSONResponse({}, 400)
            return {**self.seen.document(), "texts": self.seen.texts.document(after=texts_after)}

    def start_again(self) -> None:
        """Count from 1 again, and decode two requests."""
        self.seen = Observations(texts=KeptTexts(10))
        for _ in range(2):
            self.decode(0)

    def stop_reporting(self) -> None:
        """Press Ctrl-C."""
        raise KeyboardInterrupt

    def decode(self, num_windows: int) -> None:
        """Decode windows, of which each eighth is plain, and one request."""
        for number in range(num_windows):
            drafts = number % 8 > 0
            name, lengths = ("tuned", (3, 3, 2)) if drafts else ("plain", (8,))
            window = TimedWindow(int(drafts), 1.0, 8, 15 if drafts else 8, 0.5, 16 if drafts else 0, lengths, 40.0)
            self.seen.window(name, window)
        job = Job(DecodingRequest([7] * 30, Ending(99)), lambda _: None)
        for event in (Prefill(7, 0.1), Round((7, 7), 3, 1, 0.1, 0.0), RequestEnd()):
            self.seen.observe(job, event)


def test_what_a_server_has_seen_is_reported_once_whatever_is_started_again(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDTUNE_API_KEY", "secret")
    production = Production()
    production.decode(800)
    with listening(production.app) as server:
        for _ in range(2):  # the service is started again, and so is the reporter
            with serving(tmp_path, jobs) as command:
                first = command("observe", JOB, "--server", server)
                assert first.exit_code == 0, first.output
                assert "too little data" in first.output
                assert "of 700 windows and 100 plain ones" in first.output
        production.decode(800)  # 600 windows of the first report have been dropped
        with serving(tmp_path, jobs) as command:
            more = command("observe", JOB, "--server", server)
            assert "holds  speed-up in production 1.88" in more.output
            assert "of 1400 windows and 200 plain ones" in more.output
            production.seen = Observations()  # as of a server that is started again: it counts from 1
            production.decode(8)
            assert "of 1407 windows and 201 plain ones" in command("observe", JOB, "--server", server).output
            assert "of 1407 windows" in command("observe", JOB).output
    assert set(production.keys) == {"Bearer secret"}
    assert jobs.observations.kept(JOB).requests[-1].new_tokens == 3


def test_a_reporter_goes_on_when_something_is_away(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    production = Production()
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        production.decode(8)
        if len(waits) == 3:
            raise KeyboardInterrupt

    with listening(production.app) as server, serving(tmp_path, jobs) as command:
        sound = production.seen.document
        answers = iter([{"windows": "?"}, sound, sound])
        monkeypatch.setattr(Observations, "document", lambda self: _answer(next(answers)))
        monkeypatch.setattr(time, "sleep", wait)
        result = command("observe", JOB, "--server", server, "--every", "60")
    monkeypatch.undo()
    assert waits == [60, 60, 60]
    refused, first, second = [line for line in result.output.splitlines() if "report" in line or "windows" in line]
    assert refused.startswith("not reported: the answer of http://127.0.0.1")
    assert "of 7 windows and 1 plain ones" in first
    assert "of 14 windows and 2 plain ones" in second


def test_texts_are_reported_only_if_all_ask_for_them(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    production = Production()
    production.decode(8)
    with listening(production.app) as server:
        with serving(tmp_path, jobs) as command:
            told = command("observe", JOB, "--server", server, "--texts")
            assert told.exit_code == 2
            assert "keeps no texts: start it with --keep-texts" in told.output
            production.seen = Observations(texts=KeptTexts(10))
            production.decode(8)
            assert "start it with --accept-texts" in command("observe", JOB, "--server", server, "--texts").output
            assert "texts" not in command("observe", JOB, "--server", server).output
        with serving(tmp_path, jobs, RetuningPolicy(most_texts=4)) as command:
            assert "  1 texts kept" in command("observe", JOB, "--server", server, "--texts").output
            production.decode(0)
            assert "  2 texts kept" in command("observe", JOB, "--server", server, "--texts").output
            changes = iter([lambda: production.decode(0), production.start_again, production.stop_reporting])
            monkeypatch.setattr(time, "sleep", lambda seconds: next(changes)())
            sent: list[list[int]] = []
            keep = ObservationStore.keep

            def keeping(self: ObservationStore, search: str, report: ObservationReport, *, most_texts: int) -> None:
                if report.texts:
                    sent.append([each.number for each in report.texts])
                keep(self, search, report, most_texts=most_texts)

            monkeypatch.setattr(ObservationStore, "keep", keeping)
            monkeypatch.setattr(kept_texts, "MOST_SHOWN", 1)
            command("observe", JOB, "--server", server, "--texts", "--every", "60")
            assert sent == [[1], [2], [3], [1], [2]], "each text once, also those of a server that was started again"
            assert "nothing is kept" in command("forget", JOB).output
    assert jobs.observations.texts(JOB) == []


def test_reports_of_texts_fit_into_a_body() -> None:
    longest = ObservedText(number=1, prompt=(999_999,) * LONGEST_PROMPT, continuation=(999_999,) * LONGEST_CONTINUATION)
    found = list(portions([longest] * 50))
    assert sum(map(len, found)) == 50
    whole = [
        ObservationReport(search=JOB, server="0" * 32, windows=[], requests=[], texts=each).model_dump_json()
        for each in found
    ]
    assert max(map(len, whole)) < MAX_BODY_BYTES
    short = [ObservedText(number=1, prompt=(1,), continuation=(1, 2))] * 250
    assert [len(each) for each in portions(short)] == [100, 100, 50]
    assert list(portions([])) == []


def _answer(found: Any) -> Any:
    return found() if callable(found) else found


def test_a_server_that_is_away_or_another_program_is_said_in_one_line(jobs: Jobs, tmp_path: Path) -> None:
    other = FastAPI()
    with serving(tmp_path, jobs) as command, listening(other) as server:
        for address, why in ((server, "answers with status 404"), ("http://127.0.0.1:1", "no answer from the server")):
            result = command("observe", JOB, "--server", address)
            assert result.exit_code == 2
            assert why in result.output
        assert "give --server as well" in command("observe", JOB, "--every", "5").output
