"""A thread that does something at intervals for as long as its owner lives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import sqlalchemy as sa


class Heartbeat:
    """Calls a bound method every `seconds` until it is stopped, or until the object of the method is gone.

    A beat that the database refuses is left out: the next one counts as well, and whether a lease was lost meanwhile is found where
    the lease is used.
    """

    def __init__(self, beat: Callable[[], None], seconds: float) -> None:
        self._stopped = threading.Event()
        method = weakref.WeakMethod(beat)
        threading.Thread(target=_run, args=(method, seconds, self._stopped), daemon=True, name="heartbeat").start()

    def stop(self) -> None:
        """End the beats."""
        self._stopped.set()


def _run(method: weakref.WeakMethod[Callable[[], None]], seconds: float, stopped: threading.Event) -> None:
    while not stopped.wait(seconds):
        beat = method()
        if beat is None:
            return
        try:
            beat()
        except sa.exc.SQLAlchemyError:
            continue
        finally:
            del beat
