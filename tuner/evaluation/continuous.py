"""Decoding of many requests side by side, as the server does it, without HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from decoding.arms.chooser import ArmChooser
from decoding.arms.windows import TimedWindow
from decoding.decode import Request
from decoding.rounds import Prefill, Round
from decoding.serving.batch import ContinuousBatch, RowDecoder
from decoding.serving.waiting_room import Job, RequestEnd, WaitingRoom
from decoding.text import Ending
from tuner.errors import ConfigError
from tuner.inputs.datasets import open_table


def read_prompts(path: str) -> list[str]:
    """Return the prompts in a file's column `prompt`. Raises `ConfigError` without the column or without a prompt."""
    table = open_table(path)
    table.require("prompt")
    prompts = [text for text in table.values("prompt") if text]
    if not prompts:
        raise ConfigError(f"{path} has no prompt")
    return prompts


def greedy_requests(prompts: Iterable[str], tokenizer: Any, max_new_tokens: int) -> list[Request]:
    """Return a request for each prompt that has tokens. Raises `ConfigError` if none has."""
    encoded = [tokenizer(text, verbose=False)["input_ids"] for text in prompts]
    requests = [Request(ids, Ending(max_new_tokens)) for ids in encoded if ids]
    if not requests:
        raise ConfigError("no prompt has a token")
    return requests


class Always(ArmChooser):
    """Chooses the same of `num_profiles` arms at any time; `PLAIN` never drafts."""

    def __init__(self, arm: int, num_profiles: int) -> None:
        super().__init__([None] * num_profiles)
        self.arm = arm

    def begin(self, num_running: int) -> int:
        """Return the arm."""
        return self.arm

    def learn(self, window: TimedWindow) -> int:
        """Return the arm."""
        return self.arm


def decode_side_by_side(decoder: RowDecoder, requests: Sequence[Request], level: int) -> tuple[float, list[list[int]]]:
    """Return the seconds of decoding all requests, `level` at a time with continuous batching, and the tokens of each."""
    room, texts = WaitingRoom(len(requests)), [list[int]() for _ in requests]
    longest = max(len(request.prompt) + request.ending.max_new_tokens for request in requests)
    batch = ContinuousBatch(decoder, room, num_rows=level, max_length=longest)
    for request, text in zip(requests, texts, strict=True):
        room.put(Job(request, _Collector(text)))
    start = time.perf_counter()
    while batch.advance():
        pass
    return time.perf_counter() - start, texts


class _Collector:
    """A listener that collects tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __call__(self, event: Prefill | Round | RequestEnd) -> None:
        """See `Listener`."""
        if isinstance(event, Prefill):
            self._tokens.append(event.token)
        elif isinstance(event, Round):
            self._tokens += event.tokens
