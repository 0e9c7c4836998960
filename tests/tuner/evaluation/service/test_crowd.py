"""Many watchers of one job at a real service: its limit holds, and it answers when they have gone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.service import listening
from tuner.errors import ConfigError
from tuner.evaluation.service import crowd as crowds
from tuner.evaluation.service.crowd import Crowd, crowd
from tuner.progress import Unwatched
from tuner.service.admission import Allowed
from tuner.service.app import MAX_STREAMS, ServiceSettings, create_service
from tuner.service.jobs import Jobs


def test_a_crowd_is_served_up_to_the_limit_and_the_rest_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Jobs(f"sqlite:///{tmp_path / 'service.db'}")

    @contextmanager
    def in_this_process(_: str, folder: Path) -> Iterator[tuple[int, int]]:
        allowed = Allowed([str(folder / "model")], [str(folder / "prompts.jsonl")])
        with listening(create_service(jobs, ServiceSettings(allowed, folder / "searches"))) as address:
            yield os.getpid(), int(address.rpartition(":")[2])

    monkeypatch.setattr(crowds, "_service", in_this_process)
    found = crowd(jobs.database, tmp_path, MAX_STREAMS + 20, Unwatched())
    jobs.close()
    assert found.statuses == {"200": MAX_STREAMS, "503": 20}
    assert found.served == MAX_STREAMS
    assert found.failures == []
    assert found.facts["statuses"] == {"200": MAX_STREAMS, "503": 20}


def test_silence_and_other_errors_are_failures() -> None:
    found = Crowd(9, Counter({"200": 3, "503": 3, "500": 2, "silent": 1}), 3, False, 0.1, (1.0, 2.0))
    assert found.failures == [
        "clients whose answer was 500: 2",
        "clients whose answer was silent: 1",
        "no other client was answered meanwhile",
    ]


def test_more_clients_than_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ulimit"):
        crowd("sqlite://", tmp_path, 10**9, Unwatched())
