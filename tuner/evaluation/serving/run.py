"""`sdtune evaluate serving` from its settings to its results on disk."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Group

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.profile import DraftProfile
from decoding.target import Target
from decoding.text import Ending
from tuner.errors import ConfigError
from tuner.evaluation.contract import Report
from tuner.evaluation.serving.processes import RunningServer, free_port, own_command, running, stock_command
from tuner.evaluation.serving.settings import ServingEvaluation
from tuner.inputs.datasets import open_table
from tuner.inputs.models import eos_token_ids, load
from tuner.progress import Progress
from tuner.results import check_results_folder, stamped, write_json, write_text
from tuner.tables import figures_table

NAME = "serving"
CONTEXT = 1024
"""Longest sequence that the servers take, in tokens."""


def run_and_write(settings: ServingEvaluation, progress: Progress) -> Report:
    """Run both parts and write `serving.json` and `serving.txt`. Raises `SdtuneError` for errors of the user."""
    if find_spec("openai") is None:
        raise ConfigError("the evaluation needs the package openai: pip install 'sdtune[test]'")
    check_results_folder(settings.out)
    settings.out.mkdir(exist_ok=True)
    profile = DraftProfile.load(settings.profile)
    name = settings.model or profile.target.model
    references, context = _references(settings, profile, name, progress)
    document = asyncio.run(_drive(settings, name, references, context, progress))
    _write(settings, document)
    return Report(_tables(document), succeeded=document["succeeded"])


def _write(settings: ServingEvaluation, document: dict[str, Any]) -> None:
    write_json(settings.out, NAME, stamped(document, torch.device("cpu")))
    write_text(settings.out, NAME, _tables(document))


def _references(
    settings: ServingEvaluation, profile: DraftProfile, name: str, progress: Progress
) -> tuple[list[Any], int]:
    """Return plain decoding's continuations of the prompts, and the longest sequence that the servers will take."""
    from tuner.evaluation.serving.traffic import Reference

    table = open_table(settings.dataset)
    table.require("prompt")
    loaded = load(name, revision=profile.target.revision, dtype=profile.target.dtype, device="cpu")
    target = Target(loaded.model)
    context = min(CONTEXT, target.context_length or CONTEXT)
    longest = 10 * settings.max_new_tokens  # the clients that vanish ask for it
    eos = eos_token_ids(loaded.model)
    encoded = [(text, loaded.tokenizer(text, verbose=False)["input_ids"]) for text in table.values("prompt")]
    fitting = [(text, ids) for text, ids in encoded if ids and len(ids) + longest < context][: settings.prompts]
    if not fitting:
        raise ConfigError(
            f"no prompt leaves room for {longest} tokens in a context of {context}: try fewer --max-new-tokens"
        )
    progress.stage("decoding plainly", len(fitting))
    references = []
    for text, ids in fitting:
        tokens = plain_decoder(target).generate(Request(ids, Ending(settings.max_new_tokens, eos))).tokens
        references.append(Reference(text, len(ids), tokens, eos, loaded.tokenizer))
        progress.advance()
    return references, context


async def _drive(
    settings: ServingEvaluation, name: str, references: list[Any], context: int, progress: Progress
) -> dict[str, Any]:
    document: dict[str, Any] = {"succeeded": True, "context": context}
    common = ["--max-length", str(context), "--max-batch", str(max(settings.streams, *settings.levels))]
    if settings.threads is not None:
        common += ["--threads", str(settings.threads)]
    with ExitStack() as stack:

        def start(label: str, command: Any, port: int, model: str) -> RunningServer:
            log = settings.out / f"{label.replace(' ', '_')}.log"
            return stack.enter_context(running(label, command, port, model, log, settings.threads))

        port = free_port()
        own = start("sdtune", own_command(settings.profile, name, port, "--model", name, *common), port, name)
        if settings.requests:
            document["traffic"] = await _traffic(settings, own, references, context, progress)
            document["succeeded"] = document["traffic"]["num_wrong"] == 0 and document["traffic"]["is_idle"]
            _write(settings, document)
        if settings.rounds:
            port = free_port()
            command = own_command(settings.profile, name, port, "--plain", "--model", name, *common)
            servers = [own, start("plain", command, port, name)]
            if settings.stock:
                port = free_port()
                servers.append(start("transformers serve", stock_command(name, port), port, name))
            document |= await _throughput(settings, servers, references, progress)
            document["succeeded"] &= not any(sum(row["wrong"].values()) for row in document["throughput"])
    return document


async def _traffic(
    settings: ServingEvaluation, own: RunningServer, references: list[Any], context: int, progress: Progress
) -> dict[str, Any]:
    from tuner.evaluation.serving.traffic import Clients

    progress.stage("mixed requests", settings.requests)
    chance = random.Random(settings.seed)
    clients = Clients(own, references, longest=settings.max_new_tokens, context=context, streams=settings.streams)
    first = max(settings.requests // 10, 1)
    await clients.drive(first, chance, progress)
    is_idle = await clients.idle()
    early = own.resident_bytes()
    await clients.drive(settings.requests - first, chance, progress)
    is_idle &= await clients.idle()
    late = own.resident_bytes()
    return {
        "requests": settings.requests,
        "outcomes": {kind: dict(counts) for kind, counts in sorted(clients.traffic.outcomes.items())},
        "num_wrong": clients.traffic.num_wrong,
        "wrong": clients.traffic.wrong,
        "is_idle": is_idle,
        "megabytes": {f"after {first}": early / 1e6, f"after {settings.requests}": late / 1e6},
        "growth": late / early - 1,
    }


async def _throughput(
    settings: ServingEvaluation, servers: list[RunningServer], references: list[Any], progress: Progress
) -> dict[str, Any]:
    from tuner.evaluation.serving.throughput import compare, measure

    progress.stage("throughput", (settings.rounds + 1) * len(settings.levels) * len(servers))
    samples = await measure(servers, references, settings, progress)
    return {"samples": samples, "throughput": compare(samples, settings.levels, [server.name for server in servers])}


def _tables(document: dict[str, Any]) -> Group:
    shown: list[Any] = []
    if "traffic" in document:
        traffic = document["traffic"]
        table = figures_table(f"{traffic['requests']} mixed requests", "kind", "right", "otherwise")
        for kind, counts in traffic["outcomes"].items():
            others = ", ".join(f"{number} {outcome}" for outcome, number in counts.items() if outcome != "right")
            table.add_row(kind, str(counts.get("right", 0)), others or "0")
        memory = ", ".join(f"{value:.0f} MB {when}" for when, value in traffic["megabytes"].items())
        shown += [table, f"memory: {memory} ({traffic['growth']:+.1%})"]
    if "throughput" in document:
        rows = document["throughput"]
        table = figures_table(
            "tokens per second, all streams together",
            "streams",
            *rows[0]["tokens_per_second"],
            *(f"over {name}" for name in rows[0]["ratio"]),
        )
        for row in rows:
            rates = [f"{value:.1f}" for value in row["tokens_per_second"].values()]
            ratios = [f"{r['value']:.2f} [{r['ci95'][0]:.2f}, {r['ci95'][1]:.2f}]" for r in row["ratio"].values()]
            table.add_row(str(row["streams"]), *rates, *ratios)
        wrong = sum(sum(row["wrong"].values()) for row in rows)
        shown += [table, f"answers that differ from plain decoding: {wrong}"]
    return Group(*shown)
