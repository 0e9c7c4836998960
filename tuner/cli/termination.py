"""SIGTERM, by which schedulers end a process, handled as Ctrl-C is: work is closed, and what is best is written."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Termination:
    """Context in which SIGTERM raises KeyboardInterrupt in the main thread. `was_asked` tells it from Ctrl-C afterwards."""

    def __init__(self) -> None:
        self.was_asked = False
        self._before: Any = None
        self._is_set = False

    def __enter__(self) -> Termination:
        # Only the main thread may set handlers, and one that the program was started with to ignore is kept.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before, self._is_set = signal.signal(signal.SIGTERM, self._raise), True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_set:
            signal.signal(signal.SIGTERM, self._before)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.was_asked = True
        raise KeyboardInterrupt
