"""Results of a bench: every sample of every contender, and the rates, ratios and intervals derived from them. Data only."""

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
    """One continuation of one prompt by one contender. Tokens that arrive with the prefill do not count as decoded.

    In a batch, seconds are the seconds of the whole batch; everything else belongs to this sequence.
    """

    prompt: int
    """Index among the prompts of the bench; every `batch_size` consecutive prompts form a batch."""
    repeat: int
    batch_size: int = 1
    """Number of sequences in its batch."""
    prompt_tokens: int
    prefill_seconds: float
    prefill_tokens: int
    decode_seconds: float
    decode_tokens: int
    passes: int
    """Number of passes that gave the decoded tokens."""
    identical: bool
    """True if the tokens are those of plain decoding of the prompt by itself."""
    tie: bool = False
    """True if not identical, but the first differing token is a numerical tie of the target's logits."""

    @classmethod
    def of(
        cls, prompt: int, repeat: int, prompt_tokens: int, batch: TimedBatch, text: int, comparison: Comparison
    ) -> TextSample:
        """Return the sample of sequence `text` of a batch."""
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
        """Index of its batch; of the prompt if `batch_size` is 1."""
        return self.prompt // self.batch_size


@dataclass(frozen=True)
class Entry:
    """A measured contender: what it is, and its samples in the order of measurement."""

    name: str
    description: str
    settings: dict[str, Any]
    samples: tuple[TextSample, ...]

    @property
    def long_enough(self) -> frozenset[int]:
        """Indices of the batches in which every repeat decoded `FEWEST_DECODED` tokens or more per sequence on average."""
        decoded: dict[tuple[int, int], list[int]] = {}
        for sample in self.samples:
            decoded.setdefault((sample.batch, sample.repeat), []).append(sample.decode_tokens)
        too_short = {batch for (batch, _), tokens in decoded.items() if fmean(tokens) < FEWEST_DECODED}
        return frozenset(sample.batch for sample in self.samples) - too_short

    def seconds_per_token(self, batches: Sequence[int]) -> np.ndarray:
        """Return the decode-phase seconds per token, [batches].

        Repeats of a batch are averaged into one figure: they say nothing about other prompts.
        """
        return np.array([self._of(batch) for batch in batches])

    def _of(self, batch: int) -> float:
        """Return the seconds per token of one batch; each sample carries the seconds of the whole batch."""
        samples = [sample for sample in self.samples if sample.batch == batch]
        return sum(s.decode_seconds / s.batch_size for s in samples) / sum(s.decode_tokens for s in samples)

    @property
    def prefill_seconds(self) -> float:
        """Median prefill seconds over all samples."""
        return median(sample.prefill_seconds for sample in self.samples)

    @property
    def tokens_per_pass(self) -> float:
        """Decoded tokens per pass and sequence; 0 if there was no pass."""
        passes = sum(sample.passes for sample in self.samples)
        return sum(sample.decode_tokens for sample in self.samples) / passes if passes else 0.0

    @property
    def num_identical(self) -> int:
        """Number of samples whose tokens are those of plain decoding."""
        return sum(sample.identical for sample in self.samples)

    @property
    def num_ties(self) -> int:
        """Number of samples that first differ from plain decoding at a numerical tie."""
        return sum(sample.tie for sample in self.samples)


@dataclass(frozen=True)
class BenchResult:
    """All contenders on the same prompts. Rates and ratios are over the batches in `counted`, with equal weights.

    A batch is one prompt if `batch_size` is 1.
    """

    entries: dict[str, Entry]
    left_out: dict[str, str]
    """Contenders that could not be measured, with the reasons."""
    counted: tuple[int, ...]
    num_prompts: int
    roofline: Roofline
    account: Account | None
    """Account of the profile's decode time, if it was taken."""
    facts: dict[str, Any]
    """Task, device and versions as plain data."""
    remarks: tuple[str, ...] = ()
    batch_size: int = 1

    def rate(self, name: str) -> Interval:
        """Return the decoded tokens per second over all sequences, with the 95 % interval over batches."""
        seconds = self._seconds(name)
        return paired_interval(np.ones_like(seconds), seconds)

    def over(self, name: str, reference: str) -> Interval:
        """Return the paired speed-up of `name` over `reference`, with the 95 % interval over batches."""
        return paired_interval(self._seconds(reference), self._seconds(name))

    def share_of_roofline(self, name: str) -> float:
        """Return the rate as a share of the roofline."""
        return self.rate(name).value / self.roofline.tokens_per_second

    def _seconds(self, name: str) -> np.ndarray:
        return self.entries[name].seconds_per_token(self.counted)


def comparable(entries: Sequence[Entry]) -> tuple[dict[str, Entry], dict[str, str], tuple[int, ...]]:
    """Return the entries that can be compared, the reasons of the others, and the batches in which all entries decoded enough.

    A contender that drafts before the prefill ends may write a whole short sequence within it. Raises DatasetError if fewer than
    two batches remain.
    """
    units = units_of(entries[0].samples[0].batch_size)
    left_out = {
        entry.name: f"wrote nearly everything within its prefill: fewer than {FEWEST_DECODED} tokens per sequence after it on all "
        f"{units} but {len(entry.long_enough)}"
        for entry in entries
        if len(entry.long_enough) < 2 and entry.name not in (PROFILE, PLAIN)
    }
    kept = {entry.name: entry for entry in entries if entry.name not in left_out}
    counted = tuple(sorted(frozenset.intersection(*(entry.long_enough for entry in kept.values()))))
    if len(counted) < 2:
        raise DatasetError(
            f"only {len(counted)} {units} are continued with at least {FEWEST_DECODED} tokens per sequence after the prefill by "
            f"all of {', '.join(kept)}: give more --max-new-tokens, or prompts that the model continues at greater length"
        )
    return kept, left_out, counted


def units_of(batch_size: int) -> str:
    """Return the unit of rates and intervals in words."""
    return "prompts" if batch_size == 1 else f"batches of {batch_size} prompts"


def mean_context(samples: Sequence[TextSample], counted: Sequence[int]) -> list[float]:
    """Return the mean number of positions that a plain pass attends to, for each prompt of the `counted` batches."""
    of_prompts = {sample.prompt: sample for sample in samples if sample.batch in counted}
    return [sample.prompt_tokens + (sample.decode_tokens + 1) / 2 for sample in of_prompts.values()]


def mean_prompt_tokens(result: BenchResult) -> float:
    """Return the mean prompt length of the counted batches, in tokens."""
    samples = result.entries[PLAIN].samples
    lengths = {sample.prompt: sample.prompt_tokens for sample in samples if sample.batch in result.counted}
    return fmean(lengths.values())
