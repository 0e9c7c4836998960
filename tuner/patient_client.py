"""A client of a tracking store whose calls wait while another process locks the store's SQLite file.

MLflow waits for twenty seconds. The call that it then gives up has changed nothing, so that it may be made again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

LOCKED = "database is locked"
LOCK_SECONDS = 60.0
"""Seconds for which a call is made again, as long as the storage of the trials waits."""
PAUSE_SECONDS = 0.1


class PatientClient:
    """The client that it is given, with the same attributes and methods."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return partial(self._call, found) if callable(found) else found

    def _call(self, method: Callable[..., Any], *given: Any, **named: Any) -> Any:
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                return method(*given, **named)
            # Whatever the client raises for it: only the words of SQLite are the same.
            except Exception as cause:
                if LOCKED not in str(cause) or time.monotonic() >= end:
                    raise
            time.sleep(PAUSE_SECONDS)
