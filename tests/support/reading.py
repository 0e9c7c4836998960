"""Datasets read in the process of the test, whose doubles the reader's process would not see."""

from __future__ import annotations

from typing import Any

import pytest

from tuner.inputs.data_files import answer
from tuner.inputs.datasets import READER


def read_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer the requests of tables here."""
    opened: dict[str, Any] = {}
    monkeypatch.setattr(READER, "ask", lambda request: answer(request, opened))
