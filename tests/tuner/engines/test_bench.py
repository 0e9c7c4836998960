"""Servers as contenders: requests side by side are timed together, and texts are compared with plain decoding of the same load."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from decoding.text import Ending
from tuner.engines.bench import EngineDecoding, EngineServers, engine_judge
from tuner.engines.contract import DraftCounts, EngineProgram, ServerSettings
from tuner.engines.server import Client
from tuner.errors import EngineError
from tuner.measuring.baseline import Baseline


class _Answers(Client):
    """A client of which only the counters are asked: they count three rounds per reading."""

    def counters(self) -> dict[str, float]:
        readings = self.__dict__.setdefault("readings", [0])
        readings[0] += 1
        return {"rounds": 3.0 * readings[0]}


def test_requests_side_by_side_are_timed_from_the_first_request_to_the_last_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Engine:
        def continuation(self, client: Client, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
            return (*prompt, num_tokens)

        def counters_after(self, client: Client, before: dict[str, float], num_requests: int) -> dict[str, float]:
            assert num_requests == 2
            return client.counters()

        def counts(self, counters: dict[str, float]) -> DraftCounts:
            return DraftCounts(int(counters["rounds"]), 2 * int(counters["rounds"]), int(counters["rounds"]))

    seconds = iter((10.0, 12.5))
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    server = EngineDecoding("draft", cast(EngineProgram, Engine()), _Answers(1, "engine"), by_load=True)
    done = server.decode([(1, 2), (3, 4)], 9)
    assert done.texts == ((1, 2, 9), (3, 4, 9))
    assert (done.decode_seconds, done.decode_tokens, done.prefill_tokens) == (2.5, 6, 0)
    assert (done.rounds, done.drafted, done.accepted) == (3, 6, 3)


def test_what_plain_decoding_does_at_the_same_load_is_no_fault_of_the_draft() -> None:
    target: Any = SimpleNamespace(runner=SimpleNamespace(exact_width=8), dtype=torch.float32)
    baseline = Baseline(((1,),), ((10, 11),), (0,), Ending(2, frozenset()))
    judge = engine_judge(lambda: target, baseline)
    assert judge("draft", 0, {"plain": (10, 12), "draft": (10, 12)}).identical
    assert judge("draft", 0, {"plain": (10, 12), "draft": (10, 11)}).identical
    assert not judge("draft", 0, {"plain": (10, 12), "draft": (10, 13)}).identical
    assert not judge("plain", 0, {"plain": (10, 12)}).identical, "plain decoding itself is compared with that of one"
    alone = engine_judge(lambda: target, replace(baseline, continuations=()))
    assert not alone("draft", 0, {"plain": (10, 12), "draft": (10, 11)}).identical, "of one request each"


def test_where_memory_is_short_the_servers_of_other_candidates_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    running: list[str] = []

    @contextmanager
    def served(program: Any, plan: Any, settings: Any, flags: Sequence[str], log: Path) -> Iterator[Client]:
        name = " ".join(flags)
        if name == "unknown":
            raise EngineError("vLLM ended with status 1: ValueError: unknown method")
        if len(running) == 3:
            raise EngineError("vLLM ended with status 1: torch.OutOfMemoryError: CUDA out of memory")
        running.append(name)
        yield Client(1, "vLLM")
        running.remove(name)

    monkeypatch.setattr("tuner.engines.bench.served", served)
    program: Any = SimpleNamespace(complete=lambda *asked: None)
    exports: Any = SimpleNamespace(plain=None, write=lambda candidate: (None, (candidate,)))
    with EngineServers(program, exports, ServerSettings(64, cache_values=48), tmp_path, (1,)) as servers:
        assert servers.plain
        for candidate in ("one", "two"):
            servers.drafted(cast(Any, candidate))
        with pytest.raises(EngineError, match="unknown method"):
            servers.drafted(cast(Any, "unknown"))
        assert running == ["", "one", "two"]
        servers.drafted(cast(Any, "three"))
        assert running == ["", "three"]
    assert not running
