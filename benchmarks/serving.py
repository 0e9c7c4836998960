"""Is every answer of `sdtune serve` right, does it stay small, and how fast is it? Exit status 1 for any wrong answer.

First mixed requests by the `openai` client: streamed and not, of many lengths, with stop strings, up to the limit of the context;
clients that cancel, clients that vanish, bodies that are wrong. Each greedy answer is compared with plain decoding by this process,
each sample with a second one of the same seed. Memory is read after the first tenth of the requests and after the last.

Then throughput: streams side by side, against the same server with --plain, and against `transformers serve` with --stock. The
servers take turns, and ratios are over rounds.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import openai

from benchmarks.results import show, write
from benchmarks.task import arguments
from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.profile import DraftProfile
from decoding.target import Target
from decoding.text import Ending
from studies.ratios import Work, speed_ratio
from tuner.engines.contract import Launch
from tuner.engines.server import HOST, Client, free_port, serving
from tuner.errors import ConfigError
from tuner.inputs.datasets import open_table
from tuner.inputs.models import eos_token_ids, load

CONTEXT = 1024
"""Longest sequence that the servers take, in tokens."""
START_SECONDS = 300
REQUESTS_PER_STREAM = 2
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


class RunningServer(NamedTuple):
    """A server that answers `/health`."""

    engine: Client
    model: str
    """Name that clients give."""

    @property
    def client(self) -> openai.AsyncOpenAI:
        url = f"http://{HOST}:{self.engine.port}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600)


class Reference(NamedTuple):
    """A prompt, and plain decoding's tokens after it."""

    prompt: str
    num_prompt: int
    tokens: tuple[int, ...]
    tokenizer: Any

    def text(self, num_tokens: int) -> str:
        return str(self.tokenizer.decode(self.tokens[:num_tokens], skip_special_tokens=True))


def references_of(args: Namespace, profile: DraftProfile, model: str) -> tuple[list[Reference], int]:
    """Return plain decoding's continuations of the prompts, and the longest sequence that the servers will take."""
    table = open_table(args.dataset)
    table.require("prompt")
    loaded = load(model, revision=profile.target.revision, dtype=profile.target.dtype, device="cpu")
    target, eos = Target(loaded.model), eos_token_ids(loaded.model)
    context = min(CONTEXT, target.context_length or CONTEXT)
    longest = 10 * args.max_new_tokens  # the clients that vanish ask for it
    encoded = [(text, loaded.tokenizer(text, verbose=False)["input_ids"]) for text in table.values("prompt")]
    fitting = [(text, ids) for text, ids in encoded if ids and len(ids) + longest < context][: args.prompts]
    if not fitting:
        raise ConfigError(f"no prompt leaves room for {longest} tokens in {context}: try fewer --max-new-tokens")
    plain = plain_decoder(target)
    return [
        Reference(
            text, len(ids), plain.generate(Request(ids, Ending(args.max_new_tokens, eos))).tokens, loaded.tokenizer
        )
        for text, ids in fitting
    ], context


class Clients:
    """Clients of one server, `streams` at a time."""

    def __init__(
        self, server: RunningServer, references: Sequence[Reference], longest: int, context: int, streams: int
    ) -> None:
        self.outcomes: dict[str, Counter[str]] = {}
        self.wrong: list[dict[str, Any]] = []
        self._server, self._references, self._longest = server, references, longest
        self._context, self._streams, self._client = context, streams, server.client

    async def drive(self, num_requests: int, chance: random.Random) -> None:
        """Send requests of random kinds and lengths, and compare the answers."""
        kinds = chance.choices(list(KINDS), weights=list(KINDS.values()), k=num_requests)
        plans = iter([(kind, chance.choice(self._references), random.Random(chance.random())) for kind in kinds])

        async def work() -> None:
            for kind, reference, own in plans:
                try:
                    outcome = await self._send(kind, reference, own)
                except openai.APIStatusError as error:
                    outcome = f"status {error.status_code}"
                    self.wrong.append({"kind": kind, "error": str(error)})
                self.outcomes.setdefault(kind, Counter())[outcome] += 1

        await asyncio.gather(*(work() for _ in range(self._streams)))

    async def _send(self, kind: str, reference: Reference, chance: random.Random) -> str:
        num_tokens = chance.randint(1, self._longest)
        settings: dict[str, Any] = {"model": self._server.model, "prompt": reference.prompt, "temperature": 0}
        settings["max_tokens"] = num_tokens
        expected, room = reference.text(num_tokens), self._context - reference.num_prompt
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
                text = await self._cut({**settings, "max_tokens": room}, len(expected))
                return self._judge(kind, settings, text[: len(expected)], expected)
            case "beyond the limit":
                return await self._refused({**settings, "max_tokens": room + 1})
            case "wrong body":
                return await self._refused({**settings, **chance.choice(WRONG)})
            case "cancelled stream":
                text = await self._cut({**settings, "max_tokens": self._longest}, chance.randint(1, 40))
                return self._judge(kind, settings, text, reference.text(self._longest)[: len(text)])
            case _:
                request = asyncio.ensure_future(self._whole({**settings, "max_tokens": 10 * self._longest}))
                await asyncio.sleep(chance.uniform(0.0, 2.0))
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)
                return "right"

    def _judge(self, kind: str, settings: dict[str, Any], found: str, expected: str) -> str:
        if found == expected:
            return "right"
        self.wrong.append({"kind": kind, **settings, "found": found, "expected": expected})
        return "wrong"

    async def _whole(self, settings: dict[str, Any]) -> str:
        return str((await self._client.completions.create(**settings)).choices[0].text)

    async def _stream(self, settings: dict[str, Any]) -> str:
        answer = await self._client.completions.create(**settings, stream=True)
        return "".join([chunk.choices[0].text async for chunk in answer])

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
        known = {key: settings.pop(key) for key in ("model", "prompt")}
        try:
            await self._client.completions.create(**known, extra_body=settings)
        except openai.APIStatusError as error:
            has_object = isinstance(error.body, dict) and "message" in error.body
            return "right" if 400 <= error.status_code < 500 and has_object else f"status {error.status_code}"
        return "wrong"

    async def is_idle(self) -> bool:
        """Wait until no request is left on the server; return False if some stay."""
        for _ in range(120):
            counters = await asyncio.to_thread(self._server.engine.counters)
            if not any(value for name, value in counters.items() if name.startswith("vllm:num_requests_")):
                return True
            await asyncio.sleep(0.5)
        return False


async def mixed_requests(
    args: Namespace, own: RunningServer, references: Sequence[Reference], context: int
) -> dict[str, Any]:
    chance = random.Random(args.seed)
    clients = Clients(own, references, args.max_new_tokens, context, args.streams)
    first, is_idle, megabytes = max(args.requests // 10, 1), True, []
    for count in (first, args.requests - first):
        await clients.drive(count, chance)
        is_idle &= await clients.is_idle()
        megabytes.append(own.engine.counters()["process_resident_memory_bytes"] / 1e6)
    rows = [{"kind": kind, **counts} for kind, counts in sorted(clients.outcomes.items())]
    wrong = sum(number for counts in clients.outcomes.values() for name, number in counts.items() if name != "right")
    return {"rows": rows, "num_wrong": wrong, "wrong": clients.wrong, "is_idle": is_idle, "megabytes": megabytes}


async def throughput(
    args: Namespace, servers: Sequence[RunningServer], references: Sequence[Reference]
) -> list[dict[str, Any]]:
    """Return a row per number of streams: tokens per second of each server, the first one's ratio to each other over rounds.

    A stream sends its requests one after another. All servers get the same prompts, and the order of servers alternates.
    """
    samples: dict[tuple[int, str], list[tuple[float, int]]] = {}
    num_wrong: Counter[int] = Counter()
    for number in range(-1, args.rounds):  # the first round warms up
        for level in args.levels:
            first = max(number, 0) * level * REQUESTS_PER_STREAM
            chosen = [references[(first + index) % len(references)] for index in range(level * REQUESTS_PER_STREAM)]
            for server in servers if number % 2 else reversed(servers):
                seconds, tokens, wrong = await _run(server, chosen, level, args.max_new_tokens)
                num_wrong[level] += wrong
                if number >= 0:
                    samples.setdefault((level, server.engine.title), []).append((seconds, tokens))
    rows = []
    for level in args.levels:
        works = {server.engine.title: Work.of(samples[level, server.engine.title]) for server in servers}
        row: dict[str, Any] = {"streams": level}
        row |= {f"{name} tok/s": round(work.tokens_per_second, 1) for name, work in works.items()}
        own, *others = works
        if args.rounds > 1:
            row |= {f"over {name}": f"{speed_ratio(works[name], works[own]):.2f}" for name in others}
        rows.append({**row, "wrong": num_wrong[level]})
    return rows


async def _run(
    server: RunningServer, chosen: Sequence[Reference], level: int, num_tokens: int
) -> tuple[float, int, int]:
    client, waiting, wrong = server.client, iter(chosen), 0

    async def stream() -> None:
        nonlocal wrong
        for reference in waiting:
            settings: dict[str, Any] = {"model": server.model, "prompt": reference.prompt, "max_tokens": num_tokens}
            answer = await client.completions.create(**settings, temperature=0, stream=True)
            text = "".join([chunk.choices[0].text or "" async for chunk in answer if chunk.choices])
            wrong += text != reference.text(num_tokens)

    start = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(level)))
    seconds = time.perf_counter() - start
    await client.close()
    # Counted alike for all servers: the tokens of plain decoding, which all write.
    return seconds, sum(min(num_tokens, len(each.tokens)) for each in chosen), wrong


async def drive(
    args: Namespace, model: str, references: Sequence[Reference], context: int, logs: Path
) -> dict[str, Any]:
    common = ["--model", model, "--max-length", str(context), "--max-batch", str(max(args.streams, *args.levels))]
    common += [] if args.threads is None else ["--threads", str(args.threads)]
    threads = {} if args.threads is None else {"OMP_NUM_THREADS": str(args.threads)}
    document: dict[str, Any] = {"context": context}
    with ExitStack() as stack:

        def start(label: str, command: Sequence[str]) -> RunningServer:
            client, log = Client(free_port(), label), logs / f"{label.replace(' ', '_')}.log"
            launch = Launch((*command, "--port", str(client.port)), threads)
            return RunningServer(stack.enter_context(serving(launch, client, log, start_seconds=START_SECONDS)), model)

        serve = [sys.executable, "-m", "tuner.cli.main", "serve", str(args.profile), "--served-model-name", model]
        own = start("sdtune", [*serve, *common])
        if args.requests:
            document["mixed"] = await mixed_requests(args, own, references, context)
        if args.rounds:
            servers = [own, start("plain", [*serve, "--plain", *common])]
            if args.stock:
                program = str(Path(sys.executable).with_name("transformers"))
                options = ["--host", "127.0.0.1", "--dtype", "float32", "--device", "cpu"]
                servers.append(start("transformers serve", [program, "serve", model, *options]))
            document["throughput"] = await throughput(args, servers, references)
    return document


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("profile", type=Path)
    parser.add_argument("dataset", help="prompts: a file with a column `prompt`")
    parser.add_argument("--model", help="default: the profile's")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--requests", type=int, default=500, help="mixed ones, or 0")
    parser.add_argument("--streams", type=int, default=16, help="mixed requests at a time")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="most of a request")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 4, 8, 16], help="streams side by side")
    parser.add_argument("--rounds", type=int, default=3, help="of the throughput, or 0")
    parser.add_argument("--stock", action="store_true", help="measure `transformers serve` too")
    parser.add_argument("--logs", type=Path, default=Path(), help="folder of the servers' logs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    profile = DraftProfile.load(args.profile)
    model = args.model or profile.target.model
    references, context = references_of(args, profile, model)
    document = asyncio.run(drive(args, model, references, context, args.logs))
    mixed, rows = document.get("mixed"), document.get("throughput", [])
    if mixed:
        early, late = mixed["megabytes"]
        show(
            f"{args.requests} mixed requests; memory {early:.0f} MB after a tenth, {late:.0f} MB at the end",
            mixed["rows"],
        )
    if rows:
        show("Tokens per second, all streams together", rows)
    write(args.json, document, rows)
    failed = any(row["wrong"] for row in rows) or bool(mixed and (mixed["num_wrong"] or not mixed["is_idle"]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
