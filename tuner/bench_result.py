"""What a bench showed: every sample of every contender, and the rates, ratios and intervals that follow. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from decoding.documents import Document
from decoding.exactness import Comparison
from decoding.profile import Interval
from studies.measurement import paired_interval
from tuner.accounting import Account
from tuner.contenders import PLAIN, PROFILE
from tuner.contest import Writing
from tuner.errors import DatasetError
from tuner.measure import FEWEST_DECODED
from tuner.roofline import Roofline


class TextSample(Document):
    """One prompt as one contender continued it once. Tokens that came with the prefill do not count as decoded."""

    prompt: int
    """Its place among the prompts of the bench."""
    repeat: int
    prompt_tokens: int
    prefill_seconds: float
    prefill_tokens: int
    decode_seconds: float
    decode_tokens: int
    passes: int
    """In which the decoded tokens came."""
    identical: bool
    """The text is that of plain decoding."""
    tie: bool = False
    """Not identical, but the first differing token was a numerical tie of the target's logits."""

    @classmethod
    def of(cls, prompt: int, repeat: int, prompt_tokens: int, text: Writing, comparison: Comparison) -> TextSample:
        """What is kept of a text."""
        return cls(
            prompt=prompt,
            repeat=repeat,
            prompt_tokens=prompt_tokens,
            prefill_seconds=text.prefill_seconds,
            prefill_tokens=len(text.passes[0]),
            decode_seconds=text.decode_seconds,
            decode_tokens=text.num_decoded,
            passes=text.num_passes,
            identical=comparison.identical,
            tie=comparison.tie,
        )


@dataclass(frozen=True)
class Entry:
    """A contender that was measured: what it is, and its samples in the order in which they came."""

    name: str
    description: str
    settings: dict[str, Any]
    samples: tuple[TextSample, ...]

    @property
    def long_enough(self) -> frozenset[int]:
        """Prompts behind which it always decoded enough tokens for a rate."""
        too_short = {sample.prompt for sample in self.samples if sample.decode_tokens < FEWEST_DECODED}
        return frozenset(sample.prompt for sample in self.samples) - too_short

    def seconds_per_token(self, prompts: Sequence[int]) -> np.ndarray:
        """Of the decode phase, [prompts]; repeats of a prompt are one figure, as they say nothing of other prompts."""
        return np.array([self._of(prompt) for prompt in prompts])

    def _of(self, prompt: int) -> float:
        samples = [sample for sample in self.samples if sample.prompt == prompt]
        return sum(s.decode_seconds for s in samples) / sum(s.decode_tokens for s in samples)

    @property
    def prefill_seconds(self) -> float:
        """The median over all texts."""
        return median(sample.prefill_seconds for sample in self.samples)

    @property
    def tokens_per_pass(self) -> float:
        """Decoded tokens over the passes that gave them."""
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
    """All contenders on the same prompts. Rates and ratios are over the prompts in `counted`, each weighing the same."""

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

    def rate(self, name: str) -> Interval:
        """Decoded tokens per second with their 95 % interval over prompts."""
        seconds = self._seconds(name)
        return paired_interval(np.ones_like(seconds), seconds)

    def over(self, name: str, reference: str) -> Interval:
        """How many times as fast as `reference` it decodes, with the 95 % interval over prompts, in pairs."""
        return paired_interval(self._seconds(reference), self._seconds(name))

    def share_of_roofline(self, name: str) -> float:
        """Its rate over the bound of one-token passes."""
        return self.rate(name).value / self.roofline.tokens_per_second

    def _seconds(self, name: str) -> np.ndarray:
        return self.entries[name].seconds_per_token(self.counted)


def comparable(entries: Sequence[Entry]) -> tuple[dict[str, Entry], dict[str, str], tuple[int, ...]]:
    """The entries that can be compared, the reasons of the others, and the prompts behind which all of those decoded enough.

    A contender that drafts before the prefill ends may write a short text within it. Raises `DatasetError` if fewer than two
    prompts are left.
    """
    left_out = {
        entry.name: f"wrote nearly all within its prefill: fewer than {FEWEST_DECODED} tokens behind it on all prompts but "
        f"{len(entry.long_enough)}"
        for entry in entries
        if len(entry.long_enough) < 2 and entry.name not in (PROFILE, PLAIN)
    }
    kept = {entry.name: entry for entry in entries if entry.name not in left_out}
    counted = tuple(sorted(frozenset.intersection(*(entry.long_enough for entry in kept.values()))))
    if len(counted) < 2:
        raise DatasetError(
            f"only {len(counted)} prompts are continued with at least {FEWEST_DECODED} tokens behind the prefill by all of "
            f"{', '.join(kept)}: give more --max-new-tokens, or prompts that the model continues at greater length"
        )
    return kept, left_out, counted


def mean_context(samples: Sequence[TextSample], counted: Sequence[int]) -> list[float]:
    """Positions that a pass of plain decoding attends to, the mean over the passes of each prompt in `counted`."""
    of_prompts = {sample.prompt: sample for sample in samples}
    return [of_prompts[prompt].prompt_tokens + (of_prompts[prompt].decode_tokens + 1) / 2 for prompt in counted]


def mean_prompt_tokens(result: BenchResult) -> float:
    """How long the counted prompts are."""
    lengths = {sample.prompt: sample.prompt_tokens for sample in result.entries[PLAIN].samples}
    return fmean(lengths[prompt] for prompt in result.counted)
