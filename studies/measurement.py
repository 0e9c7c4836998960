"""What real speculative decoding of a candidate showed, prompt by prompt, paired with plain decoding of the same prompts.

Where prompts are decoded several in step, a sample is a batch of them, and what is said of prompts holds for batches. All samples
are kept; the rates, the speed-up and its interval are derived from them. Data only: `tuner.measuring.paired` fills it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from pydantic import Field
from scipy import stats

from decoding.documents.strict_yaml import Document
from decoding.profile import Interval


class BatchTexts(Document):
    """Of the texts of a batch: how many there are, and how many are plain decoding's or parted from it at a numerical tie."""

    count: int = Field(ge=1)
    identical: int = Field(ge=0)
    ties: int = Field(ge=0)


class PromptSample(Document):
    """One prompt decoded twice in the same process: plainly and with the candidate. Seconds are of the decode phase.

    Or one batch of prompts in step: seconds are those of all together, counts are sums over the texts.
    """

    prompt: int
    """Its place in the bench."""
    plain_seconds: float
    plain_tokens: int
    draft_seconds: float
    draft_tokens: int
    rounds: int
    drafted: int
    accepted: int
    identical: bool
    """The candidate's tokens are those of plain decoding (when sampling: those of a greedy run of both)."""
    tie: bool = False
    """Not identical, but the first differing token was a numerical tie of the target's logits; in a batch, so it was with every
    text that is not identical."""
    # Left out of a sample of one prompt, as of those stored before there were batches.
    batch: BatchTexts | None = Field(None, exclude_if=lambda batch: batch is None)

    @property
    def texts(self) -> BatchTexts:
        """Its texts, counted."""
        return self.batch or BatchTexts(count=1, identical=int(self.identical), ties=int(self.tie))

    @property
    def ratio(self) -> float:
        """Plain seconds per token over the candidate's: above 1 the candidate is faster on this prompt."""
        return (self.plain_seconds / self.plain_tokens) / (self.draft_seconds / self.draft_tokens)


class Measurement(Document):
    """The samples of one candidate and what follows from them."""

    samples: tuple[PromptSample, ...]

    @cached_property
    def _seconds_per_token(self) -> tuple[np.ndarray, np.ndarray]:
        plain = np.array([s.plain_seconds / s.plain_tokens for s in self.samples])
        draft = np.array([s.draft_seconds / s.draft_tokens for s in self.samples])
        return plain, draft

    @property
    def speedup(self) -> float:
        """Mean plain seconds per token over mean candidate seconds per token, each prompt weighing the same."""
        plain, draft = self._seconds_per_token
        return float(np.mean(plain) / np.mean(draft))

    def speedup_interval(self) -> Interval:
        """The speed-up with its 95 % interval over prompts, plain and candidate in pairs; needs two prompts at least."""
        if len(self.samples) < 2:
            raise ValueError(f"an interval needs at least 2 prompts, got {len(self.samples)}")
        return paired_interval(*self._seconds_per_token)

    @property
    def plain_tokens_per_second(self) -> float:
        """Decode-phase rate of plain decoding over all prompts."""
        return sum(s.plain_tokens for s in self.samples) / sum(s.plain_seconds for s in self.samples)

    @property
    def draft_tokens_per_second(self) -> float:
        """Decode-phase rate of the candidate over all prompts."""
        return sum(s.draft_tokens for s in self.samples) / sum(s.draft_seconds for s in self.samples)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 when nothing was drafted."""
        drafted = sum(s.drafted for s in self.samples)
        return sum(s.accepted for s in self.samples) / drafted if drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens a round added to the text on average."""
        rounds = sum(s.rounds for s in self.samples)
        return sum(s.draft_tokens for s in self.samples) / rounds if rounds else 0.0

    @property
    def drafted_per_round(self) -> float:
        """Tokens a round proposed on average."""
        rounds = sum(s.rounds for s in self.samples)
        return sum(s.drafted for s in self.samples) / rounds if rounds else 0.0

    @property
    def num_prompts(self) -> int:
        """Prompts decoded, those of a batch one by one, and one as often as it was decoded."""
        return sum(s.texts.count for s in self.samples)

    @property
    def batch_size(self) -> int:
        """Prompts decoded in step."""
        return max((s.texts.count for s in self.samples), default=1)

    @property
    def num_identical(self) -> int:
        """Prompts whose tokens were those of plain decoding."""
        return sum(s.texts.identical for s in self.samples)

    @property
    def num_ties(self) -> int:
        """Prompts that parted from plain decoding at a numerical tie."""
        return sum(s.texts.ties for s in self.samples)

    @property
    def is_lossless(self) -> bool:
        """Every prompt was identical, or parted at a numerical tie."""
        return all(s.identical or s.tie for s in self.samples)


def ratio_interval(ahead: Measurement, behind: Measurement) -> Interval:
    """How many times as fast as `behind` `ahead` is on the same prompts, with its 95 % interval over prompts, in pairs.

    Both must hold one sample a prompt, in the same order, as `side_by_side` measures them; ValueError if not.
    """
    if [s.prompt for s in ahead.samples] != [s.prompt for s in behind.samples] or len(ahead.samples) < 2:
        raise ValueError("a ratio needs two measurements of the same 2 or more prompts in the same order")
    return paired_interval(behind._seconds_per_token[1], ahead._seconds_per_token[1])


def paired_interval(behind: np.ndarray, ahead: np.ndarray) -> Interval:
    """How many times as fast `ahead` is: the mean of `behind` over that of `ahead`, with its 95 % interval over prompts, in pairs.

    Both hold seconds per token, [prompts] with 2 at least, of the same prompts in the same order. The interval is Student's t of
    the logarithm of the ratio, linearised in the prompts' seconds (the ratio estimator of survey sampling).

    On a few dozen prompts the percentile bootstrap is too narrow: on real samples it held the value of a long re-measurement in
    89.6 % of 1,350 draws, bias-corrected in 87.3 %, and this in 92.1 % (the samples are those of `sdtune evaluate integrity`).
    """
    value = float(np.mean(behind) / np.mean(ahead))
    influence = behind / np.mean(behind) - ahead / np.mean(ahead)
    reach = float(stats.sem(influence) * stats.t.ppf(0.975, len(influence) - 1))
    return Interval(value=value, ci95=(value * math.exp(-reach), value * math.exp(reach)))


def pooled(measurements: Sequence[Measurement]) -> Measurement:
    """All samples of several measurements of one candidate, as one measurement."""
    return Measurement(samples=tuple(sample for measurement in measurements for sample in measurement.samples))
