"""Contenders compared on the samples that all of them decoded at some length: rates, ratios and intervals. Measures nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from decoding.profile import Interval
from studies.measurement import Measurement, PromptSample
from studies.ratios import Ratio, Work
from tuner.measuring.baseline import FEWEST_DECODED
from tuner.measuring.contender import PLAIN

FEWEST_SAMPLES = 2
"""Prompts, or batches of them, without which there is no interval."""


class Phase(Enum):
    """The part of a decoding that a speed refers to."""

    DECODE = "decode"
    """From the first token to the last; the first token does not count."""
    END_TO_END = "end to end"
    """Prefill and decode phase, with all tokens."""

    def work(self, measurement: Measurement) -> Work:
        """Return the seconds and tokens of each sample of a contender; every sample must know its prefill."""
        return self._of(measurement)[1]

    def plain(self, measurement: Measurement) -> Work:
        """Return those of the plain decoding that was timed beside it."""
        return self._of(measurement)[0]

    def _of(self, measurement: Measurement) -> tuple[Work, Work]:
        if self is Phase.DECODE:
            return measurement.plain_decode, measurement.draft_decode
        assert measurement.end_to_end is not None, "a bench times the prefill of every sample"
        return measurement.end_to_end.plain, measurement.end_to_end.draft


@dataclass(frozen=True)
class Compared:
    """Contenders by name on the same samples, plain decoding among them."""

    measurements: Mapping[str, Measurement]
    left_out: Mapping[str, str]
    """Contenders that decoded too little to be compared, with the reasons."""

    @classmethod
    def of(cls, found: Mapping[str, Measurement], *, needed: Collection[str]) -> Compared:
        """Leave out what decoded too little, unless it is needed, and the samples that one of the others decoded too little of.

        A contender that drafts before the prefill ends may write a whole short sequence within it.
        """
        left_out = {
            name: f"wrote nearly everything within its prefill: fewer than {FEWEST_DECODED} tokens per sequence after it on all "
            f"samples but {num_long}"
            for name, each in found.items()
            if name not in needed and (num_long := sum(map(is_long, each.samples))) < FEWEST_SAMPLES
        }
        kept = {name: each for name, each in found.items() if name not in left_out}
        short = {sample.prompt for each in kept.values() for sample in each.samples if not is_long(sample)}
        return cls({name: without(each, short) for name, each in kept.items()}, left_out)

    @property
    def counted(self) -> tuple[int, ...]:
        """Indices of the samples."""
        return tuple(sample.prompt for sample in self.measurements[PLAIN].samples)

    def rate(self, name: str, phase: Phase = Phase.DECODE) -> Interval:
        """Return tokens per second with the 95 % interval over samples."""
        return phase.work(self.measurements[name]).rate()

    def over(self, name: str, reference: str = PLAIN, phase: Phase = Phase.DECODE) -> Interval:
        """Return the speed-up of `name` over `reference`, with the 95 % interval over samples.

        Over plain decoding it is that over the plain decoding that was timed beside it.
        """
        own = self.measurements[name]
        slower = phase.plain(own) if reference == PLAIN else phase.work(self.measurements[reference])
        return Ratio.of_speeds(slower, phase.work(own)).interval()

    def by_category(self) -> dict[str, Compared]:
        """Return the comparison on each category with enough samples for intervals."""
        of_contenders = {name: each.by_category() for name, each in self.measurements.items()}
        return {
            category: Compared({name: each[category] for name, each in of_contenders.items()}, {})
            for category, plain in of_contenders[PLAIN].items()
            if len(plain.samples) >= FEWEST_SAMPLES
        }


def is_long(sample: PromptSample) -> bool:
    """Return whether the sequences of a sample have `FEWEST_DECODED` tokens or more in the decode phase, on average."""
    return sample.draft_tokens >= FEWEST_DECODED * sample.texts.count


def without(measurement: Measurement, prompts: Collection[int]) -> Measurement:
    """Return the measurement without the samples of these prompts."""
    return Measurement(samples=tuple(each for each in measurement.samples if each.prompt not in prompts))
