"""Recorders for a CPU: they count recordings, or charge simulated seconds for them, and replay by running again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from torch import nn

from decoding.drafts import Draft
from decoding.rounds import Round
from decoding.runners.buckets import GPU_BUCKETS, Buckets
from decoding.runners.eager import RunnerFactory
from decoding.runners.graphs import OutputsT, PassRecorder
from decoding.runners.static import StaticRunner
from tuner.measuring.contender import Clock, Elapsed


class CountingRecorder:
    """Counts recordings and replays. Running again has the effect of a replay, because nothing is recorded."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def record(self, run: Callable[[], OutputsT]) -> tuple[OutputsT, Callable[[], OutputsT]]:
        """See `PassRecorder.record`."""
        self.num_recorded += 1

        def play() -> OutputsT:
            self.num_replayed += 1
            return run()

        return run(), play


def recorded_by(recorder: PassRecorder, buckets: Buckets = GPU_BUCKETS) -> RunnerFactory:
    """Return the factory of a runner for a CPU that records as the one for a GPU does; nothing is compiled."""
    return partial(StaticRunner, compiled=False, buckets=buckets, recorder=recorder)


@contextmanager
def unchecked() -> Iterator[None]:
    """Make targets without the comparison of their runner with the eager model, for tests that compare what it writes.

    The comparison takes as long as decoding some twenty tokens.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decoding.target.target.check_runner", lambda target, eager: None)
        yield


class WatchingClock:
    """A clock that counts the recordings in what it times, by draft."""

    is_deterministic = False

    def __init__(self, clock: Clock, recorder: CountingRecorder) -> None:
        self._clock, self._recorder = clock, recorder
        self.recorded: Counter[Draft | None] = Counter()

    def start(self, draft: Draft | None = None) -> Elapsed:
        """See `Clock.start`."""
        read, seen = self._clock.start(draft), self._recorder.num_recorded

        def elapsed(record: Round | None) -> float:
            nonlocal seen
            self.recorded[draft] += self._recorder.num_recorded - seen
            seen = self._recorder.num_recorded
            return read(record)

        return elapsed


class SimulatedGPU:
    """A clock and a recorder that charge fixed seconds for what runs, whatever the CPU needs for it.

    A pass costs in proportion to the blocks that it runs; its width is free, as where reading the weights is the limit.
    A recording costs `recording_seconds` and as much as four passes: a warm-up, twice again for libraries, the capture.
    """

    is_deterministic = False

    def __init__(self, *, pass_seconds: float = 0.01, recording_seconds: float = 0.03) -> None:
        self.seconds = 0.0
        self.num_recorded = 0
        self._pass_seconds, self._recording_seconds = pass_seconds, recording_seconds

    def __call__(self) -> float:
        """Return the seconds charged so far; see `ReadSeconds`."""
        return self.seconds

    def record(self, run: Callable[[], OutputsT]) -> tuple[OutputsT, Callable[[], OutputsT]]:
        """See `PassRecorder.record`."""
        self.num_recorded += 1
        before = self.seconds
        outputs = run()
        self.seconds += self._recording_seconds + 3 * (self.seconds - before)
        return outputs, run

    @contextmanager
    def charging(self, blocks: nn.ModuleList) -> Iterator[None]:
        """Charge for every run of one of the `blocks` in the meantime."""

        def charge(*_: object) -> None:
            self.seconds += self._pass_seconds / len(blocks)

        hooks = [block.register_forward_hook(charge) for block in blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
