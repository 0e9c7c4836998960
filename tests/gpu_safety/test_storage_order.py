"""Sequences that follow one another get the same storage, for which their passes are recorded."""

from __future__ import annotations

import gc
from functools import partial

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.runners.buckets import GPU_BUCKETS
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.text import Ending
from tests.support.recorders import CountingRecorder
from tests.support.tiny import tiny_llama

SHORT = Request(list(range(5, 20)), Ending(12))


def target_and_recorder() -> tuple[Target, CountingRecorder]:
    recorder = CountingRecorder()
    return Target(tiny_llama(), partial(StaticRunner, compiled=False, buckets=GPU_BUCKETS, recorder=recorder)), recorder


def test_other_free_storages_change_nothing() -> None:
    target, recorder = target_and_recorder()
    plain_decoder(target).generate(SHORT)
    held = [target.new_cache(30), target.new_cache(30), target.new_cache(30)]
    del held
    gc.collect()
    before = recorder.num_recorded
    for _ in range(6):
        plain_decoder(target).generate(SHORT)
    assert recorder.num_recorded == before


def test_nothing_is_forgotten_when_the_longest_sequence_is_reserved_first() -> None:
    target, recorder = target_and_recorder()
    target.runner.new_cache(target.num_layers, 240)
    plain_decoder(target).generate(SHORT)
    before = recorder.num_recorded
    plain_decoder(target).generate(Request(list(range(5, 60)) * 3, Ending(60)))
    plain_decoder(target).generate(SHORT)
    assert recorder.num_recorded == before, "one reach covers them all, and the storage stayed"
