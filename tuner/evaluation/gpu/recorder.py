"""A pass recorder that notes the seconds of each recording."""

from __future__ import annotations

import time
from collections.abc import Callable

from decoding.runners.graphs import OutputsT, PassRecorder


class TimedRecorder:
    """Records with another recorder; `seconds` holds the duration of each recording, its first run included."""

    def __init__(self, inner: PassRecorder) -> None:
        self.seconds: list[float] = []
        self.num_recorded = 0
        self._inner = inner

    def record(self, run: Callable[[], OutputsT]) -> tuple[OutputsT, Callable[[], OutputsT]]:
        """See `PassRecorder.record`. Capturing waits for the device, so the host's clock tells."""
        start = time.perf_counter()
        outputs, play = self._inner.record(run)
        self.seconds.append(time.perf_counter() - start)
        self.num_recorded = self._inner.num_recorded
        return outputs, play
