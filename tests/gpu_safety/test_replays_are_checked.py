"""A runner whose recordings do not compute what eager passes do is refused before anything is decoded with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from decoding.errors import UnsupportedRunnerError
from decoding.runners.buckets import GPU_BUCKETS
from decoding.runners.contract import Outputs, Written
from decoding.runners.graphs import OutputsT, PassRecorder
from decoding.runners.static import StaticRunner
from decoding.target import Target
from tests.support.tiny import tiny_llama


class Faithful:
    """Plays a pass by running it again."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def record(self, run: Callable[[], OutputsT]) -> tuple[OutputsT, Callable[[], OutputsT]]:
        self.num_recorded += 1
        return run().copied(), run


class Stale(Faithful):
    """Plays nothing, as a graph does that was captured on a stream of another device: the first outputs come again."""

    def __init__(self, kinds: tuple[type, ...], *, wide: bool | None = None) -> None:
        super().__init__()
        self._kinds, self._wide = kinds, wide

    def record(self, run: Callable[[], OutputsT]) -> tuple[OutputsT, Callable[[], OutputsT]]:
        outputs = run().copied()
        wide = isinstance(outputs, Outputs) and outputs.logits.shape[-2] > 1
        if isinstance(outputs, self._kinds) and self._wide in (None, wide):
            return outputs, outputs.copied
        return outputs, run


def target_with(recorder: PassRecorder) -> Target:
    return Target(tiny_llama(), partial(StaticRunner, compiled=False, buckets=GPU_BUCKETS, recorder=recorder))


def test_a_faithful_recorder_is_accepted() -> None:
    target = target_with(Faithful())
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
    recorder = Faithful()
    target = target_with(recorder)
    recorder.record = Stale((Outputs,)).record  # type: ignore[method-assign]
    assert "when it is repeated" in str(target.unbatchable_reason)


def test_checking_leaves_no_recording_bound_to_memory_that_is_gone() -> None:
    target = target_with(Faithful())
    assert target.unbatchable_reason is None
    runner = target.runner
    assert isinstance(runner, StaticRunner)
    bound = {key[1] for known in runner._prepared.values() for key in known}
    assert bound <= set(runner._storages)
