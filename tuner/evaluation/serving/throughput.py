"""Tokens per second of several servers at several numbers of streams, in turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import openai

from studies.ratios import Work, speed_ratio
from tuner.evaluation.serving.processes import RunningServer
from tuner.evaluation.serving.traffic import Reference
from tuner.progress import Progress

REQUESTS_PER_STREAM = 2


async def measure(
    servers: Sequence[RunningServer], references: Sequence[Reference], settings: Any, progress: Progress
) -> list[dict[str, Any]]:
    """Return a sample per round, level and server: seconds, tokens, and the number of answers that differ from plain decoding.

    A stream sends its requests one after another. All servers get the same prompts, and the order of servers alternates.
    """
    samples = []
    for number in range(-1, settings.rounds):  # the first round warms up
        for level in settings.levels:
            first = max(number, 0) * level * REQUESTS_PER_STREAM
            chosen = [references[(first + index) % len(references)] for index in range(level * REQUESTS_PER_STREAM)]
            for server in servers if number % 2 else reversed(servers):
                seconds, tokens, wrong = await _run(server, chosen, level, settings.max_new_tokens)
                if number >= 0:
                    samples.append(
                        {
                            "round": number,
                            "streams": level,
                            "server": server.name,
                            "seconds": seconds,
                            "tokens": tokens,
                            "wrong": wrong,
                        }
                    )
                progress.advance()
    return samples


async def _run(
    server: RunningServer, chosen: Sequence[Reference], level: int, num_tokens: int
) -> tuple[float, int, int]:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)
    waiting = iter(chosen)
    tokens = wrong = 0

    async def stream() -> None:
        nonlocal tokens, wrong
        for reference in waiting:
            pieces = [
                chunk.choices[0].text or ""
                async for chunk in await client.completions.create(
                    model=server.model, prompt=reference.prompt, max_tokens=num_tokens, temperature=0, stream=True
                )
                if chunk.choices
            ]
            wrong += "".join(pieces) != reference.text(num_tokens)
            # Counted alike for all servers: the tokens of plain decoding, which all write.
            tokens += min(num_tokens, len(reference.tokens))

    start = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(level)))
    seconds = time.perf_counter() - start
    await client.close()
    return seconds, tokens, wrong


def compare(samples: Sequence[dict[str, Any]], levels: Sequence[int], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per level: tokens per second of each server, and the first one's ratio to each other, over rounds."""

    def work(level: int, name: str) -> Work:
        chosen = [each for each in samples if each["streams"] == level and each["server"] == name]
        return Work(
            np.array([each["seconds"] for each in chosen]), np.array([float(each["tokens"]) for each in chosen])
        )

    rows = []
    for level in levels:
        works = {name: work(level, name) for name in names}
        row: dict[str, Any] = {
            "streams": level,
            "tokens_per_second": {n: w.tokens_per_second for n, w in works.items()},
        }
        others = names[1:] if len(works[names[0]].seconds) > 1 else ()
        row["ratio"] = {name: speed_ratio(works[name], works[names[0]]).model_dump(mode="json") for name in others}
        row["wrong"] = {
            n: sum(e["wrong"] for e in samples if e["streams"] == level and e["server"] == n) for n in names
        }
        rows.append(row)
    return rows
