"""One cell run to its record, in this process or in one of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from decoding.errors import SdtuneError
from tuner.evaluation.suite.contract import Cell, Place
from tuner.evaluation.suite.records import CellRecord
from tuner.evaluation.suite.relay import replay
from tuner.progress import Progress

LOG = "log.txt"
PROGRAM = (sys.executable, "-m", "tuner.evaluation.suite.worker")
LONGEST_CAUSE = 600
GRACE_SECONDS = 120.0
"""Seconds that an interrupted process has to write what it has; a search saves its best profile so far."""

Execute = Callable[[Place, Cell, Progress], CellRecord]
"""Runs a cell and returns its record, which is on disk. Raises KeyboardInterrupt if the user stops it: there is no record then."""


def execute_here(place: Place, cell: Cell, progress: Progress) -> CellRecord:
    """Run a cell in this process; an error is its outcome, and ends nothing else."""
    start, key = time.perf_counter(), cell.key()
    facts: dict[str, Any]
    try:
        facts = {"status": "ok", "result": cell.run(progress)}
    except SdtuneError as cause:
        facts = {"status": "failed", "cause": str(cause)}
    except Exception as cause:  # a cell may fail in any way: its cause is its result, and the next cell goes on
        traceback.print_exc()
        facts = {"status": "failed", "cause": f"{type(cause).__name__}: {' '.join(str(cause).split())[:LONGEST_CAUSE]}"}
    record = CellRecord(id=cell.id, key=key, seconds=time.perf_counter() - start, **facts)
    place.records.write(record)
    return record


def execute_apart(place: Place, cell: Cell, progress: Progress) -> CellRecord:
    """Run a cell in a process of its own, which gives all memory back at its end and may die without ending the suite."""
    start, key = time.perf_counter(), cell.key()
    log = place.records.folder(cell.id) / LOG
    log.parent.mkdir(parents=True, exist_ok=True)
    order = {"suite": place.suite.model_dump(mode="json"), "out": str(place.out), "cell": cell.id}
    how = _run_worker(json.dumps(order), log, progress)
    record = place.records.read(cell.id, key)
    if how is None and record is not None:
        return record
    record = CellRecord(
        id=cell.id, key=key, status="died", seconds=time.perf_counter() - start, cause=how or "no record"
    )
    place.records.write(record)
    return record


def _run_worker(order: str, log: Path, progress: Progress) -> str | None:
    """Run the worker's program to its end; return how it ended, or None if it ended as it should.

    On Ctrl-C the worker is interrupted too, and has `GRACE_SECONDS` to end.
    """
    with log.open("a", encoding="utf-8") as errors, _open_worker(order, errors) as process:
        try:
            assert process.stdout is not None, "it is a pipe"
            for line in process.stdout:
                replay(json.loads(line), progress)
            return _how_it_ended(process.wait(), log)
        except BaseException:
            _stop(process)
            raise


def _open_worker(order: str, errors: IO[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PROGRAM, order],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        process_group=0,  # Ctrl-C in a terminal reaches this process alone, which passes it on once
    )


def _stop(process: subprocess.Popen[str]) -> None:
    """Interrupt a process, and kill it with all that it started if it does not end in time."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=GRACE_SECONDS)
    with suppress(ProcessLookupError):  # nothing of its group is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _how_it_ended(code: int, log: Path) -> str | None:
    if code == 0:
        return None
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"the process ended ({how})" + (f": {lines[-1][:LONGEST_CAUSE]}" if lines else "")
