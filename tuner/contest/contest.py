"""Contenders timed side by side: one recorder for all, in turns, on the same batches of prompts.

Knows neither what the contenders are (`tuner.bench.contenders`) nor what their tokens are worth (`tuner.bench.result`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from tuner.measuring.clock import Clock
from tuner.measuring.recording import Recorder, TimedBatch
from tuner.measuring.turns import WARM_UP_TOKENS, take_turns

Prompts = Sequence[Sequence[int]]
"""Token ids of the prompts of one batch."""


class Contender(Protocol):
    """A way of continuing prompts greedily.

    The contender decides how the model is run; the contest decides on the prompts, the lengths, the turns and the counting.
    """

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything needed to repeat the run: plain data for JSON."""

    @property
    def same_as(self) -> str | None:
        """Name of the contender whose tokens it must write exactly; None for plain decoding's, up to numerical ties."""

    def describe(self) -> str:
        """Return one line for the table."""

    def prepare(self, batches: Sequence[Prompts], max_new_tokens: int) -> None:
        """Do what is done once for batches of these sizes and lengths, so that no batch is charged for it."""

    def write(self, prompts: Prompts, max_new_tokens: int, recorder: Recorder) -> None:
        """Continue `prompts` as one batch and leave no trace on the model.

        Tokens go to `recorder` as soon as they are on the host. Each sequence ends with an end-of-text token of the model or after
        `max_new_tokens`. May raise anything if it cannot.
        """


OnBatch = Callable[[int, int, Mapping[str, TimedBatch]], None]
"""Receives a batch that all contenders have continued: its index, the repeat (from 0), and the results by contender."""


class Contest:
    """Contenders by name. One that fails is dropped, with the reason in `left_out`; errors of `needed` contenders are raised."""

    def __init__(self, contenders: Mapping[str, Contender], clock: Clock, *, needed: Collection[str] = ()) -> None:
        self.running: dict[str, Contender] = dict(contenders)
        self.left_out: dict[str, str] = {}
        self._clock = clock
        self._needed = needed

    def prepare(self, batches: Sequence[Prompts], max_new_tokens: int) -> None:
        """Let every contender prepare for all batches of the contest."""
        for name, contender in list(self.running.items()):
            with self._leaving_out(name):
                contender.prepare(batches, max_new_tokens)

    def warm_up(self, batches: Sequence[Prompts]) -> None:
        """Let every contender write a few tokens after these prompts, so that one-off work is done before the contest."""
        for prompts in batches:
            for name in list(self.running):
                self._time(name, prompts, WARM_UP_TOKENS)

    def hold(self, batches: Sequence[Prompts], *, max_new_tokens: int, repeats: int = 1, on_batch: OnBatch) -> None:
        """Let every contender continue every batch, in turns, and go over all batches `repeats` times."""

        def write(name: str, unit: tuple[int, int]) -> TimedBatch | None:
            _, index = unit
            return self._time(name, batches[index], max_new_tokens) if name in self.running else None

        def report(unit: tuple[int, int], results: Mapping[str, TimedBatch | None]) -> None:
            repeat, index = unit
            on_batch(index, repeat, {name: batch for name, batch in results.items() if batch is not None})

        units = [(repeat, index) for repeat in range(repeats) for index in range(len(batches))]
        take_turns(list(self.running), units, write, report)

    def _time(self, name: str, prompts: Prompts, max_new_tokens: int) -> TimedBatch | None:
        recorder = Recorder(self._clock.start(), num_sequences=len(prompts))
        with self._leaving_out(name):
            self.running[name].write(prompts, max_new_tokens, recorder)
            return recorder.batch()
        return None

    @contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        """Leave out a contender that fails in this context, unless it is needed."""
        try:
            yield
        except Exception as cause:  # code of others on a model of any family may fail in any way: the reason is shown
            if name in self._needed:
                raise
            self.left_out[name] = reason_of(cause)
            del self.running[name]


def reason_of(cause: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    message = str(cause).strip().split("\n")[0][:160]
    return f"{type(cause).__name__}: {message}" if message else type(cause).__name__
