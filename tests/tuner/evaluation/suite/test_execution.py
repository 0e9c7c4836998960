"""Cells in processes of their own: what they report, how they die, and how they are interrupted."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from studies.contract import TrialRecord
from tests.support.records import record
from tests.support.suites import search_found
from tuner.evaluation.suite.contract import Place, record_of
from tuner.evaluation.suite.document import Suite
from tuner.evaluation.suite.execution import execute_apart, execute_here
from tuner.evaluation.suite.relay import RelayedProgress, replay
from tuner.evaluation.suite.search_cell import SearchCell
from tuner.progress import Progress, Unwatched


class Notes(Unwatched):
    """Progress that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def stage(self, name: str, total: int | None = None) -> None:
        self.told.append((name, total))

    def advance(self, steps: int = 1) -> None:
        self.told.append(steps)

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        self.told.append((record, best))

    def say(self, line: str) -> None:
        self.told.append(line)


@pytest.fixture
def cell(tmp_path: Path) -> SearchCell:
    suite = Suite.model_validate(
        {"models": {"m": {"model": "nowhere"}}, "tasks": {"t": {"dataset": "t.jsonl"}}, "methods": ["swift"]}
    )
    return SearchCell(Place(suite, tmp_path), "m", "float32", "t", "swift")


def worker(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Make the processes of cells run this code."""
    monkeypatch.setattr("tuner.evaluation.suite.execution.PROGRAM", (sys.executable, "-c", code))


def test_reports_arrive_as_they_were_made() -> None:
    lines, notes = io.StringIO(), Notes()
    trial = record()

    def report(progress: Progress) -> None:
        progress.stage("warming up", 3)
        progress.advance(2)
        progress.trial(trial, None)
        progress.say("done")

    report(RelayedProgress(lines))
    for line in lines.getvalue().splitlines():
        replay(json.loads(line), notes)
    assert notes.told == [("warming up", 3), 2, (trial, None), "done"]


def test_an_error_is_the_outcome_of_its_cell(cell: SearchCell, capsys: pytest.CaptureFixture[str]) -> None:
    found = execute_here(cell.place, cell, Unwatched())
    assert found.status == "failed"
    assert "t.jsonl" in found.cause
    assert record_of(cell.place, cell) == found
    assert "Traceback" not in capsys.readouterr().err  # the reason says it all


def test_a_process_that_dies_leaves_a_record_with_its_last_words(
    cell: SearchCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(monkeypatch, "import os, sys; print('out of memory', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)")
    found = execute_apart(cell.place, cell, Unwatched())
    assert (found.status, found.cause) == ("died", "the process ended (killed by SIGKILL): out of memory")
    assert record_of(cell.place, cell) == found


def test_a_process_reports_its_progress_and_its_record_is_taken(
    cell: SearchCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cell.place.records.folder(cell.id) / "record.json"
    done = {
        "id": cell.id,
        "key": cell.key(),
        "status": "ok",
        "seconds": 1.0,
        "result": search_found().model_dump(mode="json"),
    }
    worker(monkeypatch, f"print('{{\"say\": [\"hello\"]}}'); open({str(path)!r}, 'w').write({json.dumps(done)!r})")
    notes = Notes()
    assert execute_apart(cell.place, cell, notes).is_done
    assert notes.told == ["hello"]


def test_ctrl_c_interrupts_the_process_and_leaves_no_record(cell: SearchCell, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = cell.place.out / "ended"
    code = f"""
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins with it ignored
try:
    print('{{"say": ["ready"]}}', flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    open({str(ended)!r}, "w").close()
"""
    worker(monkeypatch, code)

    class Impatient(Notes):
        def say(self, line: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute_apart(cell.place, cell, Impatient())
    assert ended.exists()
    assert record_of(cell.place, cell) is None


def test_the_program_of_a_cell_writes_its_record(cell: SearchCell) -> None:
    """A whole process, on a data set that is not there."""
    found = execute_apart(cell.place, cell, Unwatched())
    assert found.status == "failed"
    assert "t.jsonl" in found.cause
