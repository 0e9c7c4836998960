"""Contenders in turns on the same prompts: rates, ratios with intervals, and whether outputs equal plain decoding's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import BaseStreamer

from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.errors import one_line
from decoding.losslessness import compare
from decoding.target import Target
from decoding.target.backends import attention_backends
from decoding.text import Ending
from decoding.timing.stopwatch import Stopwatch
from studies.ratios import Work, speed_ratio

PLAIN = "plain"
Prompts = Sequence[tuple[int, ...]]


class BatchSample(NamedTuple):
    """What a contender wrote for one batch: tokens per sequence, and seconds of both phases."""

    texts: list[tuple[int, ...]]
    prefill_seconds: float
    decode_seconds: float
    decoded: int
    """Tokens of the decode phase: all but the first of each sequence."""
    passes: int | None = None


Write = Callable[[Prompts, int], BatchSample]
"""Continues a batch of prompts greedily by at most a number of tokens."""


class Interrupted(Exception):
    """A step ran out of time, with the part of its result that it has."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.result = result
        super().__init__("interrupted")


def own(decoder: Decoder, eos: frozenset[int]) -> Write:
    """Return one of our decoders as a contender."""

    def write(prompts: Prompts, max_new_tokens: int) -> BatchSample:
        found = decoder.generate_batch([Request(prompt, Ending(max_new_tokens, eos)) for prompt in prompts])
        texts = [each.tokens for each in found.generations]
        passes = sum(len(each.rounds) for each in found.generations)
        decoded = sum(len(text) for text in texts) - len(texts)
        return BatchSample(texts, found.prefill_seconds, found.decode_seconds, decoded, passes)

    return write


def stock(model: PreTrainedModel, eos: frozenset[int], **options: Any) -> Write:
    """Return transformers' `generate` with these options as a contender."""
    watch, pad = Stopwatch(model.device), min(eos, default=0)

    def write(prompts: Prompts, max_new_tokens: int) -> BatchSample:
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(each)) + list(each) for each in prompts], device=model.device)
        mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts], device=model.device)
        first, start = _FirstToken(), watch.now()
        with attention_backends(model.device):
            found = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(eos) or None,
                pad_token_id=pad,
                streamer=first,
                **options,
            )
        end = watch.now()
        texts = [_ended(row, eos) for row in found[:, longest:].tolist()]
        decoded = sum(map(len, texts)) - first.num_tokens
        return BatchSample(texts, first.seconds - start, end - first.seconds, decoded)

    return write


class _FirstToken(BaseStreamer):
    """Notes when the first new tokens are on the host; the prompts arrive before them."""

    def __init__(self) -> None:
        self.seconds, self.num_tokens, self._saw_prompts = 0.0, 0, False

    def put(self, value: Tensor) -> None:
        if self._saw_prompts and not self.num_tokens:
            self.seconds, self.num_tokens = time.perf_counter(), value.numel()
        self._saw_prompts = True

    def end(self) -> None:
        """See `BaseStreamer.end`."""


def _ended(tokens: list[int], eos: frozenset[int]) -> tuple[int, ...]:
    end = next((index + 1 for index, token in enumerate(tokens) if token in eos), len(tokens))
    return tuple(tokens[:end])


class Turns:
    """The samples of several contenders on the same prompts, in batches; one contender is `plain`, the reference of all.

    Contenders that fail are left out, with the reason. Raises `Interrupted` with rates of what all had continued for a
    KeyboardInterrupt.
    """

    def __init__(
        self,
        target: Target,
        contenders: Mapping[str, Write],
        prompts: Prompts,
        *,
        max_new_tokens: int,
        repeats: int = 1,
        batch_size: int = 1,
    ) -> None:
        self.left_out: dict[str, str] = {}
        self._target, self._running, self._tokens = target, dict(contenders), max_new_tokens
        self._samples: dict[str, list[BatchSample]] = {name: [] for name in contenders}
        self._batches = [prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size)]
        try:
            # A whole lap that nobody times, the longest prompt first: greedy decoding repeats itself, so every pass that the
            # timed laps will run has then been recorded, in memory that does not grow any more.
            for batch in ([max(prompts, key=len)] * batch_size, *self._batches):
                self._turn(batch, 0)
            for turn, batch in enumerate(self._batches * repeats):
                for name, found in self._turn(batch, turn).items():
                    self._samples[name].append(found)
        except KeyboardInterrupt:
            raise Interrupted({"rows": self.rows(), "left_out": self.left_out}) from None

    def _turn(self, batch: Prompts, turn: int) -> dict[str, BatchSample]:
        """Let every contender continue a batch, in an order that rotates; return what all that run have written."""
        names = list(self._running)
        found = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            try:
                found[name] = self._running[name](batch, self._tokens)
            except Exception as cause:  # code of others may fail in any way: the reason is shown
                if name == PLAIN:
                    raise
                self.left_out[name] = f"{type(cause).__name__}: {one_line(cause)[:160]}"
                del self._running[name]
        return found

    def work(self, name: str, *, whole: bool = False) -> Work:
        """Return seconds and tokens of the decode phase by batch, or of the whole decoding."""
        found = self._samples[name]
        return Work.of(
            (each.prefill_seconds + each.decode_seconds, sum(map(len, each.texts)))
            if whole
            else (each.decode_seconds, each.decoded)
            for each in found
        )

    def ratio(self, name: str, reference: str) -> Any:
        """Return the decoding speed of `name` over that of `reference`, with its 95 % interval."""
        return speed_ratio(self.work(reference), self.work(name))

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures of each contender. Intervals need two batches."""
        rows = []
        for name in self._running:
            samples = self._samples[name]
            if not samples or not self.work(name).seconds.sum():
                continue
            row: dict[str, Any] = {"contender": name, "tok/s": round(self.work(name).tokens_per_second, 1)}
            if len(samples) > 1 and len(samples) == len(self._samples[PLAIN]):
                row["over plain"] = f"{self.ratio(name, PLAIN):.3f}"
                whole = speed_ratio(self.work(PLAIN, whole=True), self.work(name, whole=True))
                row["end to end"] = f"{whole:.3f}"
            passes = [each.passes for each in samples if each.passes]
            row["tokens per pass"] = sum(each.decoded for each in samples) / sum(passes) if passes else None
            rows.append({**row, **self.losslessness(name)})
        return rows

    def losslessness(self, name: str) -> dict[str, int]:
        """Return how many sequences equal plain decoding, differ first at a numerical tie, and are wrong."""
        counts = {"identical": 0, "ties": 0, "wrong": 0}
        for index, (found, plain) in enumerate(zip(self._samples[name], self._samples[PLAIN], strict=False)):
            batch = self._batches[index % len(self._batches)]
            for prompt, text, expected in zip(batch, found.texts, plain.texts, strict=True):
                result = compare(self._target, prompt, expected, text)
                counts["identical" if result.identical else "ties" if result.tie else "wrong"] += 1
        return counts
