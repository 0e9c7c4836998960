"""Ways of continuing prompts, timed side by side: whoever they are, by one stopwatch, in turns, on the same batches of prompts.

Knows neither what the contenders are nor what their texts are worth: see `tuner.bench.contenders` and `tuner.bench.result`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from decoding.timing import stopwatch
from decoding.timing.stopwatch import without_garbage_collection
from tuner.measuring.paired import WARM_UP_TOKENS


class Stopwatch:
    """Notes what a contender writes and when. Made when the batch begins; a contender calls `put` and reads no clock itself."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, num_texts: int = 1) -> None:
        self._clock = clock
        self._noted: list[list[tuple[tuple[int, ...], float]]] = [[] for _ in range(num_texts)]
        self._start = clock()

    def put(self, tokens: Sequence[int], text: int = 0) -> None:
        """These tokens, at least one, of a text (its number) have just come to the host; its first by the pass over its prompt."""
        self._noted[text].append((tuple(tokens), self._clock() - self._start))

    def batch(self) -> TimedBatch:
        """What was noted. Raises `ValueError` if there is nothing of a text: each has one token at least."""
        if not all(self._noted):
            raise ValueError("not a single token was handed over")
        return TimedBatch(tuple(TimedText(*zip(*noted, strict=True)) for noted in self._noted))


@dataclass(frozen=True)
class TimedText:
    """One text as it came: the tokens of each pass, and the seconds after which they had come."""

    passes: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The whole text, without its prompt."""
        return tuple(token for each in self.passes for token in each)

    def passes_from(self, seconds: float) -> tuple[tuple[int, ...], ...]:
        """The tokens of the passes behind the first that had come at that time or later."""
        later = zip(self.passes[1:], self.seconds[1:], strict=True)
        return tuple(tokens for tokens, came in later if came >= seconds)


@dataclass(frozen=True)
class TimedBatch:
    """Texts that were written side by side, in the order of their prompts.

    Prefill is all until each has its first tokens, decoding what is behind them, for everybody. Those that draft before they
    have read the prompt, as transformers' assisted generation does, may come with several first tokens, which count with the
    prefill; so does what comes of a text while the prompt of another is still being read.
    """

    texts: tuple[TimedText, ...]

    @property
    def prefill_seconds(self) -> float:
        """Until the first tokens of all texts had come."""
        return max(text.seconds[0] for text in self.texts)

    @property
    def decode_seconds(self) -> float:
        """From there to the last token of all."""
        return max(text.seconds[-1] for text in self.texts) - self.prefill_seconds

    def decoded(self, text: int) -> tuple[tuple[int, ...], ...]:
        """The tokens that a text got in `decode_seconds`, by pass: a verification each, where there are drafts."""
        return self.texts[text].passes_from(self.prefill_seconds)

    @property
    def num_decoded(self) -> int:
        """Tokens of all texts that came in `decode_seconds`."""
        return sum(len(tokens) for text in range(len(self.texts)) for tokens in self.decoded(text))


Prompts = Sequence[Sequence[int]]
"""Token ids of the prompts of one batch."""


class Contender(Protocol):
    """A way of continuing prompts greedily. It decides how the model is run; the contest what is written, when, and what counts.

    How a model's passes are carried out is a contender's own affair: another way of that is another contender.
    """

    @property
    def settings(self) -> Mapping[str, Any]:
        """What a reader needs to repeat it: plain data for JSON."""

    @property
    def same_as(self) -> str | None:
        """Whose text it writes to the last token, ties being no excuse; None: plain decoding's, up to numerical ties."""

    def describe(self) -> str:
        """One line for the table."""

    def write(self, prompts: Prompts, max_new_tokens: int, watch: Stopwatch) -> None:
        """Continue `prompts` side by side, handing tokens over as soon as they are on the host, and leave no trace on the model.

        Each text ends with an end-of-text token of the model or with `max_new_tokens`. May raise anything if it cannot.
        """


OnBatch = Callable[[int, int, Mapping[str, TimedBatch]], None]
"""Told of each batch once all have continued it: its place, the repeat (from 0), and what each contender wrote."""


class Contest:
    """Contenders by name on one device. One that fails is left out from then on, with its reason in `left_out`.

    Those in `needed` must not fail: their errors are raised.
    """

    def __init__(
        self, contenders: Mapping[str, Contender], device: torch.device, *, needed: Collection[str] = ()
    ) -> None:
        self.running: dict[str, Contender] = dict(contenders)
        self.left_out: dict[str, str] = {}
        self._device = device
        self._needed = needed

    def warm_up(self, batches: Sequence[Prompts]) -> None:
        """Let everybody write a few tokens behind these prompts; what is compiled or measured once is so afterwards."""
        for prompts in batches:
            for name in list(self.running):
                self._time(name, prompts, WARM_UP_TOKENS)

    def hold(self, batches: Sequence[Prompts], *, max_new_tokens: int, repeats: int = 1, on_batch: OnBatch) -> None:
        """Everybody continues each batch, `repeats` times over all of them, in an order that moves on by one with each.

        Differences are then differences on the same texts at nearly the same time, and nobody is always first.
        """
        order, turn = list(self.running), 0
        with without_garbage_collection():
            for repeat in range(repeats):
                for place, prompts in enumerate(batches):
                    first = turn % len(order)
                    turn += 1
                    written = {}
                    for name in [*order[first:], *order[:first]]:
                        if name in self.running and (batch := self._time(name, prompts, max_new_tokens)) is not None:
                            written[name] = batch
                    on_batch(place, repeat, written)

    def _time(self, name: str, prompts: Prompts, max_new_tokens: int) -> TimedBatch | None:
        stopwatch.Stopwatch(self._device).synchronize()
        watch = Stopwatch(num_texts=len(prompts))
        try:
            self.running[name].write(prompts, max_new_tokens, watch)
            return watch.batch()
        except Exception as cause:  # code of others on a model of any family may fail in any way: the reason is shown
            if name in self._needed:
                raise
            self.left_out[name] = reason_of(cause)
            del self.running[name]
            return None


def reason_of(cause: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    said = str(cause).strip().split("\n")[0][:160]
    return f"{type(cause).__name__}: {said}" if said else type(cause).__name__
