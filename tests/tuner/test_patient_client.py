"""Calls to a tracking store that another process locks."""

from __future__ import annotations

import pytest

from tuner.tracking import PatientClient


class Store:
    """A client that fails as often as it is told to."""

    uri = "sqlite:///mlflow.db"

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)

    def log(self, value: int, *, key: str) -> str:
        if self.failures:
            raise self.failures.pop(0)
        return f"{key}={value}"


def test_a_call_waits_for_the_lock() -> None:
    client = PatientClient(Store(*[RuntimeError("(sqlite3.OperationalError) database is locked")] * 2))
    assert client.log(1, key="a") == "a=1"
    assert client.uri == "sqlite:///mlflow.db"


def test_no_call_waits_for_ever_or_for_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.tracking.LOCK_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="locked"):
        PatientClient(Store(RuntimeError("database is locked"))).log(1, key="a")
    store = Store(RuntimeError("database or disk is full"))
    with pytest.raises(RuntimeError, match="full"):
        PatientClient(store).log(1, key="a")
    assert not store.failures
