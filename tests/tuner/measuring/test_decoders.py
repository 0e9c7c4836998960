"""Decoders are kept by draft: recordings are made once, dropped with the decoder, and no rule's state is passed on."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from decoding.decode import Request
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.target import Target
from decoding.text import Ending
from studies.contract import Candidate
from tests.support.benches import bench_on, per_token
from tests.support.recorders import CountingRecorder, recorded_by
from tests.support.records import candidate
from tests.support.tiny import tiny_llama
from tuner.measuring.paired import Bench

PROMPTS = [tuple((seed * 11 + index * 5) % 60 + 2 for index in range(9 + seed)) for seed in range(4)]
REQUEST = Request(PROMPTS[0], Ending(12))


def recorded_bench(recorder: CountingRecorder, **options: int) -> Bench:
    """Return a bench whose runner records as on a GPU, at made-up prices."""
    return bench_on(Target(tiny_llama(), recorded_by(recorder)), PROMPTS, clock=per_token(), **options)


def test_the_draft_used_longest_ago_is_dropped_and_its_recordings_with_it() -> None:
    recorder = CountingRecorder()
    bench = recorded_bench(recorder, most_kept=2)
    for block in (2, 3, 2, 4):
        bench.measure(candidate((block,)), range(4))
    before = recorder.num_recorded
    bench.measure(candidate((2,)), range(4))
    bench.measure(candidate((4,)), range(4))
    assert recorder.num_recorded == before
    bench.measure(candidate((3,)), range(4))
    assert recorder.num_recorded > before


def test_memory_is_freed_when_a_candidate_needs_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = recorded_bench(CountingRecorder())
    bench.measure(candidate((2,)), range(2))
    kept = weakref.ref(bench._decoders[LayerSkip.blocks((2,))].drafter)
    assert kept() is not None

    def full(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr("tuner.measuring.turns.Interleaved.take", full)
    with pytest.raises(torch.OutOfMemoryError):
        bench.measure(Candidate(draft=LayerSkip.blocks((3,)), draft_length=Fixed()), range(2))
    gc.collect()
    assert kept() is None
