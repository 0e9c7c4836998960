"""The decoding thread: the only one that runs the model while the server is up."""

from __future__ import annotations

import logging
from threading import Thread

from decoding.serving.batch import ContinuousBatch
from decoding.serving.waiting_room import WaitingRoom

IDLE_SECONDS = 0.5
"""Longest sleep without work; a request ends it at once."""
LAST_SECONDS = 2.0
"""Time that the latest pass has to end when the thread is stopped."""

log = logging.getLogger(__name__)


class DecodingThread:
    """Advances a batch while there is work, in a thread of its own."""

    def __init__(self, batch: ContinuousBatch, room: WaitingRoom) -> None:
        self.batch, self.room = batch, room
        self._thread = Thread(target=self._run, name="decoding", daemon=True)

    @property
    def is_alive(self) -> bool:
        """True while requests are being decoded or could be."""
        return self._thread.is_alive() and not self.room.is_closed

    def start(self) -> None:
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """True until the latest pass has ended."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End all requests and the thread, after the present pass if it takes no longer than a moment."""
        self.room.close()
        if self._thread.is_alive():
            self._thread.join(LAST_SECONDS)

    def _run(self) -> None:
        try:
            while not self.room.is_closed:
                if not self.batch.advance():
                    self.room.wait(IDLE_SECONDS)
        except BaseException:
            log.exception("the decoding thread has failed")
            raise
        finally:
            self.room.close()
            self.batch.close()
