"""Contenders of the tuner's paired bench on the same prompts, after a lap that nobody times: rates, ratios, and equal outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from decoding.decoder import Decoder
from decoding.losslessness import Comparison, compare
from decoding.profile import Interval
from decoding.target import Target
from decoding.text import Ending
from studies.measurement import Measurement, PromptSample
from tuner.measuring.baseline import Baseline
from tuner.measuring.comparison import Compared, Phase
from tuner.measuring.contender import PLAIN, Contender
from tuner.measuring.generation import StockGeneration
from tuner.measuring.paired import OwnDecoding
from tuner.measuring.turns import Interleaved, PairedBench, Texts

Prompts = Sequence[tuple[int, ...]]
Make = Callable[[str], Contender]
"""Makes the contender of a name."""


class Interrupted(Exception):
    """A step ran out of time, with the part of its result that it has."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.result = result
        super().__init__("interrupted")


def own(decoder: Decoder, eos: frozenset[int]) -> Make:
    """Return one of our decoders as a contender."""
    return lambda name: OwnDecoding(name, decoder, eos)


def stock(model: PreTrainedModel, eos: frozenset[int], **options: Any) -> Make:
    """Return transformers' `generate` with these options as a contender."""
    return lambda name: StockGeneration(name, model, eos, name, options)


class Turns:
    """The samples of several contenders on the same prompts, in batches; one contender is `plain`, the reference of all.

    Contenders that fail are left out, with the reason. Raises `Interrupted` with rates of what all had continued for a
    KeyboardInterrupt.
    """

    def __init__(
        self,
        target: Target,
        contenders: Mapping[str, Make],
        prompts: Prompts,
        *,
        max_new_tokens: int,
        repeats: int = 1,
        batch_size: int = 1,
    ) -> None:
        used = tuple(prompts[: len(prompts) // batch_size * batch_size])
        rows, ending = tuple(range(len(used))), Ending(max_new_tokens, frozenset())
        bench = PairedBench(Baseline(used, (), rows, ending, batch_size), partial(_compare, target, used))
        turns = Interleaved([make(name) for name, make in contenders.items()], may_fail={*contenders} - {PLAIN})
        self.left_out, self._samples = turns.left_out, dict[str, list[PromptSample]]()
        try:
            # A whole lap that nobody times, the longest prompt first: greedy decoding repeats itself, so every pass that the
            # timed laps will run has then been recorded, in memory that does not grow any more.
            lap = [[max(used, key=len)] * batch_size, *map(bench.batch, bench.indices)]
            turns.take(list(enumerate(lap)), max_new_tokens, lambda index, done: None)
            self._measured = bench.compete(turns, bench.indices, self._keep, repeats=repeats, plain_too=True)
        except KeyboardInterrupt:
            self._measured = {name: Measurement(samples=tuple(each)) for name, each in self._samples.items()}
            raise Interrupted({"rows": self.rows(), "left_out": self.left_out}) from None

    def _keep(self, samples: Mapping[str, PromptSample]) -> None:
        for name, sample in samples.items():
            self._samples.setdefault(name, []).append(sample)

    def ratio(self, name: str, reference: str, phase: Phase = Phase.DECODE) -> Interval:
        """Return the speed of `name` over that of `reference`, with its 95 % interval."""
        return Compared(self._measured, {}).over(name, reference, phase)

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures of each contender. Intervals need two batches."""
        rows = []
        for name, measured in self._measured.items():
            if not measured.draft_decode.seconds.sum():
                continue
            row: dict[str, Any] = {"contender": name, "tok/s": round(measured.draft_tokens_per_second, 1)}
            if len(measured.samples) > 1 and len(measured.samples) == len(self._measured[PLAIN].samples):
                row["over plain"] = f"{self.ratio(name, PLAIN):.3f}"
                row["end to end"] = f"{self.ratio(name, PLAIN, Phase.END_TO_END):.3f}"
            row["tokens per pass"] = measured.tokens_per_round
            rows.append({**row, **self.losslessness(name)})
        return rows

    def losslessness(self, name: str) -> dict[str, int]:
        """Return how many sequences equal plain decoding, differ first at a numerical tie, and are wrong."""
        measured = self._measured[name]
        identical, ties = measured.num_identical, measured.num_ties
        return {"identical": identical, "ties": ties, "wrong": measured.num_prompts - identical - ties}


def _compare(target: Target, prompts: Prompts, name: str, row: int, texts: Texts) -> Comparison:
    return compare(target, prompts[row], texts[PLAIN], texts[name])
