"""The process of one cell: `python -m tuner.evaluation.suite.worker ORDER`.

Reports of progress go to standard output; whatever else is printed goes to standard error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import IO

import optuna
import torch

from decoding.documents.strict_yaml import Document
from tuner.evaluation.suite.contract import Place
from tuner.evaluation.suite.document import Suite
from tuner.evaluation.suite.execution import execute_here
from tuner.evaluation.suite.plan import cell_named
from tuner.evaluation.suite.relay import RelayedProgress

INTERRUPTED = 130


class CellOrder(Document):
    """What a worker is asked to do."""

    suite: Suite
    out: Path
    cell: str


def main(text: str) -> int:
    """Run the cell of a `CellOrder` given as JSON; return the exit status. The record says whether the cell succeeded."""
    # In a job in the background it would be ignored, but the suite stops its cells by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    reports = _take_standard_output()
    order = CellOrder.model_validate(json.loads(text))
    place = Place(order.suite, order.out)
    cell = cell_named(place, order.cell)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if (threads := cell.config().threads) is not None:
        torch.set_num_threads(threads)
    try:
        execute_here(place, cell, RelayedProgress(reports))
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def end_with(parent: int) -> None:
    """Wait until the process `parent` is gone, then end this process and the ones that it started."""
    while os.getppid() == parent:
        time.sleep(1.0)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _take_standard_output() -> IO[str]:
    """Return standard output as a file for reports alone; what others print there goes to standard error from now on."""
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return reports


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
