"""Ways of continuing a prompt, timed side by side: whoever they are, by one stopwatch, in turns, on the same prompts.

Knows neither what the contenders are nor what their texts are worth: see `tuner.contenders` and `tuner.bench_result`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tuner.measure import WARM_UP_TOKENS, synchronize, undisturbed


class Stopwatch:
    """Notes what a contender writes and when. Made when the text begins; a contender calls `put` and reads no clock itself."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._tokens: list[tuple[int, ...]] = []
        self._seconds: list[float] = []
        self._start = clock()

    def put(self, tokens: Sequence[int]) -> None:
        """These tokens have just come to the host, the first of all by the pass over the prompt; at least one."""
        self._seconds.append(self._clock() - self._start)
        self._tokens.append(tuple(tokens))

    def writing(self) -> Writing:
        """What was noted. Raises `ValueError` if there is nothing: a text has one token at least."""
        if not self._tokens:
            raise ValueError("not a single token was handed over")
        return Writing(tuple(self._tokens), tuple(self._seconds))


@dataclass(frozen=True)
class Writing:
    """One text as it came: the tokens of each pass, and the seconds after which they had come.

    Prefill is all up to the first tokens, decoding what is behind them, for everybody. Those that draft before they have read
    the prompt, as transformers' assisted generation does, may come with several first tokens, which count with the prefill.
    """

    passes: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The whole text, without its prompt."""
        return tuple(token for each in self.passes for token in each)

    @property
    def prefill_seconds(self) -> float:
        """Until the first tokens had come."""
        return self.seconds[0]

    @property
    def decode_seconds(self) -> float:
        """From the first tokens to the last."""
        return self.seconds[-1] - self.seconds[0]

    @property
    def num_decoded(self) -> int:
        """Tokens that came in `decode_seconds`."""
        return sum(len(each) for each in self.passes[1:])

    @property
    def num_passes(self) -> int:
        """How many times tokens came in `decode_seconds`: the verifications, where there are drafts."""
        return len(self.passes) - 1


class Contender(Protocol):
    """A way of continuing one prompt greedily. It decides how the model is run; the contest what is written, when, and what counts.

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

    def write(self, prompt: Sequence[int], max_new_tokens: int, watch: Stopwatch) -> None:
        """Continue the token ids of `prompt`, handing tokens over as soon as they are on the host, and leave no trace on the model.

        The text ends with an end-of-text token of the model or with `max_new_tokens`. May raise anything if it cannot.
        """


OnTexts = Callable[[int, int, Mapping[str, Writing]], None]
"""Told of each prompt once all have continued it: its place, the repeat (from 0), and each contender's writing."""


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

    def warm_up(self, prompts: Sequence[Sequence[int]]) -> None:
        """Let everybody write a few tokens behind each of these prompts; what is compiled or measured once is so afterwards."""
        for prompt in prompts:
            for name in list(self.running):
                self._time(name, prompt, WARM_UP_TOKENS)

    def hold(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, repeats: int = 1, on_texts: OnTexts
    ) -> None:
        """Everybody continues each prompt, `repeats` times over all of them, in an order that moves on by one with each text.

        Differences are then differences on the same text at nearly the same time, and nobody is always first.
        """
        order, turn = list(self.running), 0
        with undisturbed():
            for repeat in range(repeats):
                for place, prompt in enumerate(prompts):
                    first = turn % len(order)
                    turn += 1
                    texts = {}
                    for name in [*order[first:], *order[:first]]:
                        if name in self.running and (text := self._time(name, prompt, max_new_tokens)) is not None:
                            texts[name] = text
                    on_texts(place, repeat, texts)

    def _time(self, name: str, prompt: Sequence[int], max_new_tokens: int) -> Writing | None:
        synchronize(self._device)
        watch = Stopwatch()
        try:
            self.running[name].write(prompt, max_new_tokens, watch)
            return watch.writing()
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
