"""A profile in a registry that is replaced while the server runs: the alias is asked for, and its new version taken over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

from decoding.decoder import Decoder
from decoding.deploy import load_decoder
from decoding.errors import ProfileError
from decoding.profile import DraftProfile
from decoding.serving.batch import RowDecoder
from decoding.serving.engine import DecodingThread

log = logging.getLogger(__name__)


BuildServed = Callable[[DraftProfile, Decoder], RowDecoder]
"""Returns what serves a profile, given its decoder: with arms, or the decoder alone."""


def hand_over(decoding: DecodingThread, profile: Path, build: BuildServed = lambda _, decoder: decoder) -> None:
    """Let the decoding thread use another profile as soon as the running requests have ended.

    The draft is built by the calling thread, beside the requests that are being decoded, on the target that they use: examining the
    model anew would see their passes. Only a profile with another runner needs that, and is built between two passes. Raises
    `SdtuneError` for a profile that does not fit the model, or whatever `build` raises.
    """
    new, batch = load_decoder(profile), decoding.batch
    target, wanted = batch.decoder.target, new.profile.decoding
    if (wanted.runner, wanted.exact_width) == (target.runner.name, target.runner.exact_width):
        built = build(new.profile, new.decoder_on(target))
        decoding.call(lambda: batch.replace(built))
    else:
        decoding.call(lambda: batch.replace(build(new.profile, new.decoder_for(target.model))))


class AliasWatch:
    """Calls `fetch` every `seconds` and, if it returns another path than last time, `take_over` with it.

    Both are called by a thread of its own. A registry that does not answer is logged and asked again.
    """

    def __init__(
        self, fetch: Callable[[], Path], current: Path, take_over: Callable[[Path], None], *, seconds: float
    ) -> None:
        self._fetch, self._current, self._take_over, self._seconds = fetch, current, take_over, seconds
        self._stopped = Event()
        self._thread = Thread(target=self._run, name="alias watch", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more."""
        self._stopped.set()

    def look(self) -> None:
        """Ask once."""
        try:
            found = self._fetch()
        except ProfileError as error:
            log.warning("still serving the profile in %s: %s", self._current.parent, error)
            return
        if found == self._current:
            return
        self._current = found
        try:
            self._take_over(found)
        except Exception:  # the requests go on as before, and so does the watch
            log.exception("still serving the profile before %s", found.parent)

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            self.look()
