"""Texts of late requests as token ids, kept only if the operator asks for it: to tune the next profile on what is really asked.

In memory alone: never written to disk, to a log or to the metrics.
"""

from __future__ import annotations

from array import array
from collections import deque
from itertools import count
from threading import Lock
from typing import Any, NamedTuple

from decoding.rounds import Prefill, Round
from decoding.serving.waiting_room import Job, RequestEnd

LONGEST_PROMPT = 4096
"""Tokens of a prompt; a longer one is not kept, as its end alone would be continued otherwise."""
LONGEST_CONTINUATION = 512
"""Tokens of a continuation; later ones are not kept."""
MOST_SHOWN = 100
"""Texts of one answer: writing more would keep the requests that are streamed waiting."""
SHORTEST_CONTINUATION = 2
"""Tokens of a continuation: a draft begins after the first."""


class _Kept(NamedTuple):
    number: int
    prompt: array[int]
    continuation: array[int]


class KeptTexts:
    """The latest `limit` greedy requests. An observer of the batch; any thread may read.

    Sampled requests are not kept, nor those with processors such as a repetition penalty: what the model alone would write after
    their prompts is not what they got. At most 18 KiB for each text, and as much for each that is being decoded.
    """

    def __init__(self, limit: int) -> None:
        self._numbers = count(1)
        self._texts: deque[_Kept] = deque(maxlen=limit)
        self._running: dict[Job, array[int]] = {}
        self._lock = Lock()

    def observe(self, job: Job, event: Prefill | Round | RequestEnd) -> None:
        """Collect the tokens of a request until its end."""
        if isinstance(event, Prefill):
            if _is_kept(job):
                self._running[job] = array("i", [event.token])
        elif (tokens := self._running.get(job)) is None:
            return
        elif isinstance(event, Round):
            tokens.extend(event.tokens[: LONGEST_CONTINUATION - len(tokens)])
        else:
            del self._running[job]
            if len(tokens) >= SHORTEST_CONTINUATION:
                text = _Kept(next(self._numbers), array("i", job.request.prompt), tokens)
                with self._lock:
                    self._texts.append(text)

    def document(self, after: int = 0) -> list[dict[str, Any]]:
        """Return the first `MOST_SHOWN` texts with numbers above `after`: number, and token ids of prompt and continuation."""
        with self._lock:
            found = [each for each in self._texts if each.number > after][:MOST_SHOWN]
        return [
            {"number": each.number, "prompt": each.prompt.tolist(), "continuation": each.continuation.tolist()}
            for each in found
        ]


def _is_kept(job: Job) -> bool:
    request = job.request
    is_greedy = request.acceptance.is_greedy and not request.shaping.processors
    return is_greedy and len(request.prompt) <= LONGEST_PROMPT
