"""A budget of recordings: none while anything is timed, none for a known candidate, none left behind by measurements."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from decoding.cache.kv_cache import Storage
from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.runners.buckets import GPU_BUCKETS
from decoding.target import Target
from decoding.text import Ending
from tests.support.recorders import CountingRecorder, recorded_by
from tests.support.tiny import tiny_llama
from tuner.measuring import cost_table, pass_timer
from tuner.measuring.cost_table import measure_cost_table
from tuner.measuring.pass_timer import PassTimer

BUCKETS = replace(GPU_BUCKETS, slot_step=64)
"""Many steps on short sequences, which a CPU decodes quickly."""


@contextmanager
def without_cyclic_collection() -> Iterator[None]:
    """Keep objects in reference cycles alive, as a program does that collects none at the wrong moment."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_cost_table_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[weakref.ref[PassTimer]] = []
    storages: list[weakref.ref[Storage]] = []

    def made(*args: Any, **settings: Any) -> PassTimer:
        timer = PassTimer(*args, **settings)
        timers.append(weakref.ref(timer))
        return timer

    class Watched(pass_timer._Batch):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            storages.extend(weakref.ref(each.cache.storage) for each in self._sequences)

    monkeypatch.setattr(cost_table, "PassTimer", made)
    monkeypatch.setattr(pass_timer, "_Batch", Watched)
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
