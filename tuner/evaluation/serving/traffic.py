"""Mixed requests by the openai client, and what came back."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from tuner.evaluation.serving.processes import RunningServer
from tuner.progress import Progress

KINDS = {
    "whole": 6,
    "stream": 6,
    "stop string": 2,
    "sampled twice": 2,
    "at the limit": 1,
    "beyond the limit": 1,
    "cancelled stream": 2,
    "vanished client": 2,
    "wrong body": 2,
}
"""Kinds of requests, each with its frequency."""
WRONG: tuple[dict[str, Any], ...] = (
    {"max_tokens": -1},
    {"temperature": "hot"},
    {"n": 3},
    {"unknown_key": 1},
    {"prompt": []},
    {"prompt": {"text": "x"}},
    {"model": "another"},
    {"stop": [""]},
)


@dataclass(frozen=True)
class Reference:
    """A prompt, and plain decoding's tokens after it."""

    prompt: str
    num_prompt: int
    tokens: tuple[int, ...]
    eos: frozenset[int]
    tokenizer: Any

    def text(self, num_tokens: int) -> str:
        """Return the text of the first tokens."""
        return str(self.tokenizer.decode(self.tokens[:num_tokens], skip_special_tokens=True))


@dataclass
class Traffic:
    """Outcomes by kind of request: right, wrong, or the status of an error."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, outcome: str) -> None:
        """Count an outcome."""
        self.outcomes.setdefault(kind, Counter())[outcome] += 1

    @property
    def num_wrong(self) -> int:
        """Requests that were answered otherwise than they should."""
        return sum(
            number for counts in self.outcomes.values() for outcome, number in counts.items() if outcome != "right"
        )


class Clients:
    """Clients of one server, `streams` at a time."""

    def __init__(
        self, server: RunningServer, references: Sequence[Reference], *, longest: int, context: int, streams: int
    ) -> None:
        self.traffic = Traffic()
        self._server, self._references, self._longest, self._context = server, references, longest, context
        self._streams = streams
        self._client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)

    async def drive(self, num_requests: int, chance: random.Random, progress: Progress) -> None:
        """Send requests of random kinds and lengths, and compare the answers."""
        kinds = chance.choices(list(KINDS), weights=list(KINDS.values()), k=num_requests)
        plans = iter([(kind, chance.choice(self._references), random.Random(chance.random())) for kind in kinds])

        async def worker() -> None:
            for kind, reference, own in plans:
                try:
                    self.traffic.add(kind, await self._send(kind, reference, own))
                except openai.APIStatusError as error:
                    self.traffic.add(kind, f"status {error.status_code}")
                    self.traffic.wrong.append({"kind": kind, "error": str(error)})
                progress.advance()

        await asyncio.gather(*(worker() for _ in range(self._streams)))

    async def _send(self, kind: str, reference: Reference, chance: random.Random) -> str:
        num_tokens = chance.randint(1, self._longest)
        settings: dict[str, Any] = {
            "model": self._server.model,
            "prompt": reference.prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
        }
        expected = reference.text(num_tokens)
        match kind:
            case "whole":
                return self._judge(kind, settings, await self._whole(settings), expected)
            case "stream":
                return self._judge(kind, settings, await self._stream(settings), expected)
            case "stop string":
                stop = chance.choice(expected.split() or ["?"])
                before = expected[: expected.index(stop)] if stop in expected else expected
                return self._judge(kind, settings, await self._stream({**settings, "stop": stop}), before)
            case "sampled twice":
                sampled = {**settings, "temperature": 0.8, "seed": chance.randint(0, 2**31)}
                return self._judge(kind, settings, await self._whole(sampled), await self._stream(sampled))
            case "at the limit":
                # A stop after the known text: the request reserves the whole context and ends early.
                room = self._context - reference.num_prompt
                text = await self._cut({**settings, "max_tokens": room}, len(expected))
                return self._judge(kind, settings, text[: len(expected)], expected)
            case "beyond the limit":
                return await self._refused({**settings, "max_tokens": self._context - reference.num_prompt + 1})
            case "wrong body":
                return await self._refused({**settings, **chance.choice(WRONG)})
            case "cancelled stream":
                text = await self._cut({**settings, "max_tokens": self._longest}, chance.randint(1, 40))
                return self._judge(kind, settings, text, reference.text(self._longest)[: len(text)])
            case _:
                return await self._vanish(settings, chance)

    def _judge(self, kind: str, settings: dict[str, Any], found: str, expected: str) -> str:
        if found == expected:
            return "right"
        self.traffic.wrong.append({"kind": kind, **settings, "found": found, "expected": expected})
        return "wrong"

    async def _whole(self, settings: dict[str, Any]) -> str:
        answer = await self._client.completions.create(**settings)
        return str(answer.choices[0].text)

    async def _stream(self, settings: dict[str, Any]) -> str:
        return "".join(
            [chunk.choices[0].text async for chunk in await self._client.completions.create(**settings, stream=True)]
        )

    async def _cut(self, settings: dict[str, Any], length: int) -> str:
        """Read a stream up to a number of characters, then close it."""
        text = ""
        async with await self._client.completions.create(**settings, stream=True) as stream:
            async for chunk in stream:
                text += chunk.choices[0].text
                if len(text) >= length:
                    break
        return text

    async def _refused(self, settings: dict[str, Any]) -> str:
        settings = dict(settings)
        known = {key: settings.pop(key) for key in ("model", "prompt")}
        try:
            await self._client.completions.create(**known, extra_body=settings)
        except openai.APIStatusError as error:
            has_object = isinstance(error.body, dict) and "message" in error.body
            return "right" if 400 <= error.status_code < 500 and has_object else f"status {error.status_code}"
        return "wrong"

    async def _vanish(self, settings: dict[str, Any], chance: random.Random) -> str:
        """Close the connection while the answer is being decoded."""
        request = asyncio.ensure_future(self._whole({**settings, "max_tokens": 10 * self._longest}))
        await asyncio.sleep(chance.uniform(0.0, 2.0))
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        return "right"

    async def idle(self) -> bool:
        """Wait until no request is left on the server; return False if some stay."""
        for _ in range(120):
            metrics = await asyncio.to_thread(self._server.metrics)
            if not any(value for name, value in metrics.items() if name.startswith("vllm:num_requests_")):
                return True
            await asyncio.sleep(0.5)
        return False
