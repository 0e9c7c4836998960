"""Requests side by side: several prompts continued by one server at the same time, timed by this process's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.engines.contract import DraftCounts

if TYPE_CHECKING:
    from tuner.engines.contract import EngineProgram
    from tuner.engines.loopback import Client

Clock = Callable[[], float]


@dataclass(frozen=True)
class RequestRound:
    """Prompts continued side by side: from the first request to the last answer."""

    texts: tuple[tuple[int, ...], ...]
    """Tokens of each continuation, in the order of the prompts."""
    seconds: float
    """Wall clock, prompts included: it is what all requests together have cost."""
    counts: DraftCounts

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(map(len, self.texts))


def continue_together(
    program: EngineProgram,
    client: Client,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    clock: Clock = time.perf_counter,
) -> RequestRound:
    """Send all prompts, token ids, at once, and wait for every answer; raise `EngineError` for a wrong one."""
    before = client.counters()
    with ThreadPoolExecutor(len(prompts)) as threads:
        began = clock()
        asked = [threads.submit(program.continuation, client, prompt, num_tokens) for prompt in prompts]
        texts = tuple(each.result() for each in asked)
        seconds = clock() - began
    after = program.counters_after(client, before, len(prompts))
    return RequestRound(texts, seconds, program.counts(after) - program.counts(before))
