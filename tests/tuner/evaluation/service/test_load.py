"""Short trials of one study."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

from tuner.evaluation.service.load import stored_trials, work


def test_trials_are_counted_until_all_are_there_and_read_back(tmp_path: Path) -> None:
    database, results = f"sqlite:///{tmp_path / 'load.db'}", queue.Queue()
    for number in (4, 6):  # the second goes on where the first has ended
        work(database, "load", number, threading.Barrier(1), results)
    (first, seconds), (second, _) = results.get(), results.get()
    assert (first, second) == ([0, 1, 2, 3], [4, 5])
    assert seconds > 0
    assert [record.speedup for record in stored_trials(database, "load")] == [1.0, 1.01, 1.02, 1.03, 1.04, 1.05]


def test_a_failed_process_says_why(tmp_path: Path) -> None:
    results: queue.Queue[str] = queue.Queue()
    work(f"sqlite:///{tmp_path}", "load", 4, threading.Barrier(1), results)
    assert results.get().startswith("StorageError: cannot use the storage")
