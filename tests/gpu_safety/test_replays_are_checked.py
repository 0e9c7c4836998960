"""Recordings that do not compute what eager passes do are refused, and those of earlier sequences are used again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.errors import UnsupportedRunnerError
from decoding.runners.buckets import GPU_BUCKETS
from decoding.runners.contract import Outputs, Written
from decoding.runners.graphs import OutputsT, PassRecorder
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.text import Ending
from tests.support.recorders import CountingRecorder
from tests.support.tiny import tiny_llama


class Stale(CountingRecorder):
    """Plays nothing, as a graph does that was captured on a stream of another device: the first outputs come again."""

    def __init__(self, kind: type, *, wide: bool | None = None) -> None:
        super().__init__()
        self._kind, self._wide = kind, wide

    def record(self, run: Callable[[], OutputsT]) -> tuple[OutputsT, Callable[[], OutputsT]]:
        outputs = run().copied()
        wide = isinstance(outputs, Outputs) and outputs.logits.shape[-2] > 1
        if isinstance(outputs, self._kind) and self._wide in (None, wide):
            return outputs, outputs.copied
        return outputs, run


def target_with(recorder: PassRecorder) -> Target:
    return Target(tiny_llama(), partial(StaticRunner, compiled=False, buckets=GPU_BUCKETS, recorder=recorder))


@pytest.mark.parametrize(
    "recorder",
    [Stale(Outputs, wide=False), Stale(Outputs, wide=True), Stale(Written)],
    ids=["one position", "several positions", "drafts in a chain"],
)
def test_stale_recordings_are_refused(recorder: PassRecorder) -> None:
    with pytest.raises(UnsupportedRunnerError, match="when it is repeated"):
        target_with(recorder)


def test_stale_shared_passes_are_refused() -> None:
    recorder = CountingRecorder()
    target = target_with(recorder)
    recorder.record = Stale(Outputs).record  # type: ignore[method-assign]
    assert "when it is repeated" in str(target.unbatchable_reason)


SHORT = Request(list(range(5, 20)), Ending(12))


def target_and_recorder() -> tuple[Target, CountingRecorder]:
    recorder = CountingRecorder()
    return Target(tiny_llama(), partial(StaticRunner, compiled=False, buckets=GPU_BUCKETS, recorder=recorder)), recorder


def test_nothing_is_forgotten_when_the_longest_sequence_is_reserved_first() -> None:
    target, recorder = target_and_recorder()
    target.runner.new_cache(target.num_layers, 240)
    plain_decoder(target).generate(SHORT)
    before = recorder.num_recorded
    plain_decoder(target).generate(Request(list(range(5, 60)) * 3, Ending(60)))
    plain_decoder(target).generate(SHORT)
    assert recorder.num_recorded == before, "one reach covers them all, and the storage stayed"
