"""What a bench showed: every sample of every contender, and the rates, ratios and intervals that follow. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from decoding.documents.strict_yaml import Document
from decoding.losslessness import Comparison
from decoding.profile import Interval
from studies.measurement import paired_interval
from tuner.bench.accounting import Account
from tuner.bench.contenders import PLAIN, PROFILE
from tuner.bench.roofline import Roofline
from tuner.errors import DatasetError
from tuner.measuring.baseline import FEWEST_DECODED
from tuner.measuring.recording import TimedBatch


class TextSample(Document):
    """One prompt as one contender continued it once. Tokens that came with the prefill do not count as decoded.

    Of texts that were written side by side, the seconds are those of all of them; all else is of this one.
    """

    prompt: int
    """Its place among the prompts of the bench, of which each `batch_size` are a batch."""
    repeat: int
    batch_size: int = 1
    """How many texts were written side by side, this one among them."""
    prompt_tokens: int
    prefill_seconds: float
    prefill_tokens: int
    decode_seconds: float
    decode_tokens: int
    passes: int
    """In which the decoded tokens came."""
    identical: bool
    """The text is that which plain decoding writes of the prompt alone."""
    tie: bool = False
    """Not identical, but the first differing token was a numerical tie of the target's logits."""

    @classmethod
    def of(
        cls, prompt: int, repeat: int, prompt_tokens: int, batch: TimedBatch, text: int, comparison: Comparison
    ) -> TextSample:
        """What is kept of a text, the number of which in its batch is `text`."""
        decoded = batch.decoded(text)
        num_decoded = sum(len(each.tokens) for each in decoded)
        return cls(
            prompt=prompt,
            repeat=repeat,
            batch_size=len(batch.sequences),
            prompt_tokens=prompt_tokens,
            prefill_seconds=batch.prefill_seconds,
            prefill_tokens=len(batch.sequences[text].tokens) - num_decoded,
            decode_seconds=batch.decode_seconds,
            decode_tokens=num_decoded,
            passes=len(decoded),
            identical=comparison.identical,
            tie=comparison.tie,
        )

    @property
    def batch(self) -> int:
        """The place of its batch among those of the bench; that of the prompt, if it was alone."""
        return self.prompt // self.batch_size


@dataclass(frozen=True)
class Entry:
    """A contender that was measured: what it is, and its samples in the order in which they came."""

    name: str
    description: str
    settings: dict[str, Any]
    samples: tuple[TextSample, ...]

    @property
    def long_enough(self) -> frozenset[int]:
        """Batches in which it always decoded enough tokens for a rate, a text on average."""
        decoded: dict[tuple[int, int], list[int]] = {}
        for sample in self.samples:
            decoded.setdefault((sample.batch, sample.repeat), []).append(sample.decode_tokens)
        too_short = {batch for (batch, _), tokens in decoded.items() if fmean(tokens) < FEWEST_DECODED}
        return frozenset(sample.batch for sample in self.samples) - too_short

    def seconds_per_token(self, batches: Sequence[int]) -> np.ndarray:
        """Of the decode phase, [batches]; repeats of a batch are one figure, as they say nothing of other prompts."""
        return np.array([self._of(batch) for batch in batches])

    def _of(self, batch: int) -> float:
        """The seconds of a batch stand with each of its texts: each takes its share of them here."""
        samples = [sample for sample in self.samples if sample.batch == batch]
        return sum(s.decode_seconds / s.batch_size for s in samples) / sum(s.decode_tokens for s in samples)

    @property
    def prefill_seconds(self) -> float:
        """The median over all batches."""
        return median(sample.prefill_seconds for sample in self.samples)

    @property
    def tokens_per_pass(self) -> float:
        """Decoded tokens over the passes that gave them, of each text by itself."""
        passes = sum(sample.passes for sample in self.samples)
        return sum(sample.decode_tokens for sample in self.samples) / passes if passes else 0.0

    @property
    def num_identical(self) -> int:
        """Texts that were those of plain decoding."""
        return sum(sample.identical for sample in self.samples)

    @property
    def num_ties(self) -> int:
        """Texts that parted from it at a numerical tie."""
        return sum(sample.tie for sample in self.samples)


@dataclass(frozen=True)
class BenchResult:
    """All contenders on the same prompts. Rates and ratios are over the batches in `counted`, each weighing the same.

    A batch is the prompts that are written side by side: a single one where `batch_size` is 1.
    """

    entries: dict[str, Entry]
    left_out: dict[str, str]
    """The reasons of contenders that could not be measured here."""
    counted: tuple[int, ...]
    num_prompts: int
    roofline: Roofline
    account: Account | None
    """Where the profile's time goes."""
    facts: dict[str, Any]
    """Task, device and versions: plain data."""
    remarks: tuple[str, ...] = ()
    batch_size: int = 1

    def rate(self, name: str) -> Interval:
        """Decoded tokens of all texts per second with their 95 % interval over batches."""
        seconds = self._seconds(name)
        return paired_interval(np.ones_like(seconds), seconds)

    def over(self, name: str, reference: str) -> Interval:
        """How many times as fast as `reference` it decodes, with the 95 % interval over batches, in pairs."""
        return paired_interval(self._seconds(reference), self._seconds(name))

    def share_of_roofline(self, name: str) -> float:
        """Its rate over the bound of one-token passes."""
        return self.rate(name).value / self.roofline.tokens_per_second

    def _seconds(self, name: str) -> np.ndarray:
        return self.entries[name].seconds_per_token(self.counted)


def comparable(entries: Sequence[Entry]) -> tuple[dict[str, Entry], dict[str, str], tuple[int, ...]]:
    """The entries that can be compared, the reasons of the others, and the batches in which all of those decoded enough.

    A contender that drafts before the prefill ends may write a short text within it. Raises `DatasetError` if fewer than two
    batches are left.
    """
    units = units_of(entries[0].samples[0].batch_size)
    left_out = {
        entry.name: f"wrote nearly all within its prefill: fewer than {FEWEST_DECODED} tokens a text behind it on all {units} but "
        f"{len(entry.long_enough)}"
        for entry in entries
        if len(entry.long_enough) < 2 and entry.name not in (PROFILE, PLAIN)
    }
    kept = {entry.name: entry for entry in entries if entry.name not in left_out}
    counted = tuple(sorted(frozenset.intersection(*(entry.long_enough for entry in kept.values()))))
    if len(counted) < 2:
        raise DatasetError(
            f"only {len(counted)} {units} are continued with at least {FEWEST_DECODED} tokens a text behind the prefill by all of "
            f"{', '.join(kept)}: give more --max-new-tokens, or prompts that the model continues at greater length"
        )
    return kept, left_out, counted


def units_of(batch_size: int) -> str:
    """What rates and intervals are over, in words."""
    return "prompts" if batch_size == 1 else f"batches of {batch_size} prompts"


def mean_context(samples: Sequence[TextSample], counted: Sequence[int]) -> list[float]:
    """Positions of a text that a pass of plain decoding attends to, the mean over the passes of each text in `counted` batches."""
    of_prompts = {sample.prompt: sample for sample in samples if sample.batch in counted}
    return [sample.prompt_tokens + (sample.decode_tokens + 1) / 2 for sample in of_prompts.values()]


def mean_prompt_tokens(result: BenchResult) -> float:
    """How long the prompts of the counted batches are."""
    samples = result.entries[PLAIN].samples
    lengths = {sample.prompt: sample.prompt_tokens for sample in samples if sample.batch in result.counted}
    return fmean(lengths.values())
