"""A budget of recordings: none while anything is timed, none for a known candidate, none left behind by measurements.

A runner for a CPU records as the one for a GPU does, but only counts.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoding.cache.kv_cache import Storage
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import (
    AdaEdl,
    BetaThompson,
    DraftLengthRule,
    Fixed,
    RoundCosts,
    TopProbability,
)
from decoding.drafts import Draft, EarlyExit, LayerSkip, Lookup, PlainDecoding
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.rehearsal import Contexts
from decoding.runners.buckets import GPU_BUCKETS
from decoding.target import Target
from decoding.text import Ending
from studies.contract import Candidate
from tests.support.benches import bench_on, per_token
from tests.support.heads import write_heads
from tests.support.recorders import CountingRecorder, WatchingClock, recorded_by, unchecked
from tests.support.tiny import tiny_llama
from tuner.measuring import cost_table
from tuner.measuring.cost_table import PassTimer, measure_cost_table
from tuner.measuring.paired import Bench

BUCKETS = replace(GPU_BUCKETS, slot_step=64)
"""Many steps on short sequences, which a CPU decodes quickly."""


NUM_NEW = 12
PROMPTS = [tuple((seed * 11 + index * 5) % 60 + 2 for index in range(56 + 9 * seed)) for seed in range(8)]
"""56 to 119 tokens: with the new ones, sequences cross the boundaries of reads at 64 and 128 slots."""
TEMPERATURES = {"greedily": 0.0, "by sampling": 0.8}
COSTS = RoundCosts(draft_step=0.3, verify=(1.0,) * 9)
RULES: dict[str, DraftLengthRule] = {
    "fixed": Fixed(max_tokens=5),
    "top probability": TopProbability(max_tokens=3, threshold=0.3),
    "AdaEDL": AdaEdl(max_tokens=3, initial_threshold=0.4),
    "AdaEDL, last dropped": AdaEdl(max_tokens=3, initial_threshold=0.4, keep_last=False),
    "Beta Thompson": BetaThompson(max_tokens=3, costs=COSTS),
}
DRAFTS: dict[str, Draft] = {
    "skip": LayerSkip(skip_attention=(1, 3), skip_mlp=(3,)),
    "skip from the first block": LayerSkip(skip_mlp=(0, 2)),
    "exit": EarlyExit(exit_layer=3),
    "exit with a head": EarlyExit(exit_layer=2, head="head.safetensors", head_sha256="0" * 64),
    "lookup, then skip": LayerSkip(skip_attention=(2,), lookup=Lookup(max_tokens=5)),
    "skip that checks copies": LayerSkip(skip_attention=(2,), lookup=Lookup(min_ngram=1, direct_from=3, max_tokens=3)),
    "lookup, then exit with a head": EarlyExit(
        exit_layer=2, head="head.safetensors", head_sha256="0" * 64, lookup=Lookup(max_tokens=5)
    ),
}


class Workplace:
    """A target whose runner counts recordings, with an exit head, and benches on it."""

    def __init__(self, folder: Path) -> None:
        self.recorder = CountingRecorder()
        with unchecked():
            self.target = Target(tiny_llama(4), recorded_by(self.recorder, BUCKETS))
        self._head = write_heads(self.target, folder, [2])[2]
        self.heads = HeadFolder(self.target, folder)

    def bench(self, num_prompts: int, **settings: Any) -> tuple[Bench, WatchingClock]:
        """Return a bench on every other prompt, and its clock, which sees the recordings that are timed."""
        clock = WatchingClock(per_token(), self.recorder)
        prompts = PROMPTS[::-2] if num_prompts <= 4 else PROMPTS
        return bench_on(
            self.target, prompts[:num_prompts], max_new_tokens=NUM_NEW, heads=self.heads, clock=clock, **settings
        ), clock

    def candidate(self, draft: str, rule: str) -> Candidate:
        """Return a candidate of `DRAFTS` and `RULES`, with the head if it has one."""
        document = DRAFTS[draft]
        if document.trained_head is not None:
            document = self._head.model_copy(update={"lookup": document.parts.lookup})
        return Candidate(draft=document, draft_length=RULES[rule])


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """One target for many candidates, whose own passes are all new."""
    return Workplace(tmp_path_factory.mktemp("heads"))


@contextmanager
def without_cyclic_collection() -> Iterator[None]:
    """Keep objects in reference cycles alive, as a program does that collects none at the wrong moment."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "draft", ["skip from the first block", "exit", "skip that checks copies", "lookup, then exit with a head"]
)
def test_nothing_is_recorded_while_a_candidate_is_timed(draft: str, workplace: Workplace) -> None:
    """Every third rule with each in turn."""
    for rule in list(RULES)[list(DRAFTS).index(draft) % 3 :: 3]:
        bench, clock = workplace.bench(2)
        candidate = workplace.candidate(draft, rule)
        measured = bench.measure(candidate, range(2))
        assert measured.num_identical == 2
        assert clock.recorded == {PlainDecoding(): 0, candidate.draft: 0}, rule
    assert workplace.recorder.num_recorded > 0


@pytest.mark.parametrize(
    ("draft", "rule", "how"),
    [
        ("skip", "AdaEDL, last dropped", "greedily"),
        ("lookup, then exit with a head", "Beta Thompson", "by sampling"),
    ],
)
def test_nothing_is_recorded_while_a_batch_is_timed(draft: str, rule: str, how: str, shared: Workplace) -> None:
    decoding = Decoding(temperature=TEMPERATURES[how])
    bench, clock = shared.bench(8, batch_size=4, decoding=decoding)
    candidate = shared.candidate(draft, rule)
    bench.measure(candidate, range(2))
    assert clock.recorded == {PlainDecoding(): 0, candidate.draft: 0}


def test_candidate_that_was_measured_before_records_nothing(shared: Workplace) -> None:
    bench, _ = shared.bench(3)
    candidates = [shared.candidate("skip", "fixed"), shared.candidate("exit with a head", "Beta Thompson")]
    for each in candidates:
        bench.measure(each, range(1))
    before = shared.recorder.num_recorded
    for each in candidates:
        bench.measure(bench.warm_up_rule(each, range(1)), range(1, 3))
    assert shared.recorder.num_recorded == before


def test_nothing_is_prepared_that_cannot_occur(tmp_path: Path) -> None:
    numbers = []
    for prepares in (True, False):
        workplace = Workplace(tmp_path)
        candidate = workplace.candidate("skip from the first block", "fixed")
        decoder = Decoder(workplace.target, candidate.draft, candidate.draft_length, heads=workplace.heads)
        contexts = Contexts(60, 90)
        decoder.reserve(contexts)
        before = workplace.recorder.num_recorded
        if prepares:
            decoder.prepare(contexts.shortest, contexts.longest)
        else:
            _decode_sequences_of_every_length(decoder, contexts)
        numbers.append(workplace.recorder.num_recorded - before)
    assert numbers[0] == numbers[1]


def _decode_sequences_of_every_length(decoder: Decoder, contexts: Contexts) -> None:
    for length in (contexts.shortest, 63, 65):
        for num_new in (2, 3, 4, 5, 6, 7, 12):
            for prompt in (PROMPTS[7][:length], ((5, 6) * length)[:length]):
                decoder.generate(Request(prompt, Ending(num_new)))


def test_cost_table_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[weakref.ref[PassTimer]] = []
    storages: list[weakref.ref[Storage]] = []

    def made(*args: Any, **settings: Any) -> PassTimer:
        timer = PassTimer(*args, **settings)
        timers.append(weakref.ref(timer))
        return timer

    class Watched(cost_table.PromptedBatch):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            storages.extend(weakref.ref(each.cache.storage) for each in self.sequences)

    monkeypatch.setattr(cost_table, "PassTimer", made)
    monkeypatch.setattr(cost_table, "PromptedBatch", Watched)
    recorder = CountingRecorder()
    target = Target(tiny_llama(), recorded_by(recorder, BUCKETS))
    request = Request(tuple(range(2, 30)), Ending(12))
    plain_decoder(target).generate(request)
    before = recorder.num_recorded
    with without_cyclic_collection():
        measure_cost_table(target, max_tokens=4, contexts=(40, 150), budget_seconds=0.0)
        assert len(timers) == 1
        assert len(storages) == 2
        assert not any(each() for each in timers), "the timer refers to itself"
        assert sum(each() is not None for each in storages) <= 1, "memory made for the table stays"
    assert recorder.num_recorded > before
    during = recorder.num_recorded
    plain_decoder(target).generate(request)
    assert recorder.num_recorded == during, "recordings of plain decoding were dropped"
