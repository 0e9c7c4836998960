"""A runner whose recordings do not compute what eager passes do is refused before anything is decoded with it."""

from __future__ import annotations

from functools import partial

import pytest

from decoding.errors import UnsupportedRunnerError
from decoding.runners.buckets import GPU_BUCKETS
from decoding.runners.contract import Outputs, Written
from decoding.runners.graphs import PassRecorder
from decoding.runners.static import StaticRunner
from decoding.target import Target
from tests.support.recorders import CountingRecorder
from tests.support.stale_recorder import Stale
from tests.support.tiny import tiny_llama


def target_with(recorder: PassRecorder) -> Target:
    return Target(tiny_llama(), partial(StaticRunner, compiled=False, buckets=GPU_BUCKETS, recorder=recorder))


def test_a_faithful_recorder_is_accepted() -> None:
    target = target_with(CountingRecorder())
    assert target.unbatchable_reason is None


@pytest.mark.parametrize(
    "recorder",
    [Stale((Outputs, Written)), Stale((Outputs,), wide=False), Stale((Outputs,), wide=True), Stale((Written,))],
    ids=["all", "one position", "several positions", "drafts in a chain"],
)
def test_stale_recordings_are_refused(recorder: PassRecorder) -> None:
    with pytest.raises(UnsupportedRunnerError, match="when it is repeated"):
        target_with(recorder)


def test_stale_shared_passes_are_refused() -> None:
    recorder = CountingRecorder()
    target = target_with(recorder)
    recorder.record = Stale((Outputs,)).record  # type: ignore[method-assign]
    assert "when it is repeated" in str(target.unbatchable_reason)


def test_checking_leaves_no_recording_bound_to_memory_that_is_gone() -> None:
    target = target_with(CountingRecorder())
    assert target.unbatchable_reason is None
    runner = target.runner
    assert isinstance(runner, StaticRunner)
    bound = {key[1] for known in runner._prepared.values() for key in known}
    assert bound <= set(runner._storages)
