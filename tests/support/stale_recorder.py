"""A recorder for a CPU whose recordings of some kinds of pass compute nothing."""

from __future__ import annotations

from collections.abc import Callable

from decoding.runners.contract import Outputs
from decoding.runners.graphs import OutputsT
from tests.support.recorders import CountingRecorder


class Stale(CountingRecorder):
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
