"""Results of a bench: every sample of every contender, and the rates, ratios and intervals derived from them. Data only.

A rate is all tokens over all seconds, so that texts of different lengths weigh as they do for a user.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, median
from typing import Any

import numpy as np

from decoding.profile import Interval
from studies.ratios import Ratio, Work, paired_interval
from tuner.bench.acceptance import AcceptanceRecord
from tuner.bench.contenders import PLAIN, PROFILE
from tuner.bench.sample import TextSample
from tuner.errors import DatasetError
from tuner.measuring.baseline import FEWEST_DECODED


class Phase(Enum):
    """The part of a decoding that a speed refers to."""

    DECODE = "decode"
    """From the first token to the last; the first token does not count."""
    END_TO_END = "end to end"
    """Prefill and decode phase, with all tokens."""

    def of(self, samples: Sequence[TextSample]) -> tuple[float, int]:
        """Return the seconds and tokens of the samples of one batch; each carries the seconds of the whole batch."""
        if self is Phase.DECODE:
            return sum(s.decode_seconds / s.batch_size for s in samples), sum(s.decode_tokens for s in samples)
        return sum(s.seconds / s.batch_size for s in samples), sum(s.tokens for s in samples)


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
        """Return the decode-phase seconds per token, [batches]."""
        work = self.work(batches, Phase.DECODE)
        return np.asarray(work.seconds / work.tokens)

    def work(self, batches: Sequence[int], phase: Phase) -> Work:
        """Return the seconds and tokens of each batch.

        Repeats of a batch are added up to one unit: they say nothing about other prompts.
        """
        of_batches: dict[int, list[TextSample]] = {batch: [] for batch in batches}
        for sample in self.samples:
            if sample.batch in of_batches:
                of_batches[sample.batch].append(sample)
        pairs = [phase.of(samples) for samples in of_batches.values()]
        return Work(np.array([seconds for seconds, _ in pairs]), np.array([tokens for _, tokens in pairs]))

    def time_to_first_token(self, batches: Sequence[int]) -> np.ndarray:
        """Return the prefill seconds of each batch, [batches]; the mean of its repeats."""
        wanted = {batch: [s.prefill_seconds for s in self.samples if s.batch == batch] for batch in batches}
        return np.array([fmean(seconds) for seconds in wanted.values()])

    def acceptance(self, batches: Collection[int]) -> AcceptanceRecord:
        """Return the acceptance of drafted tokens in these batches."""
        return AcceptanceRecord.of(sample for sample in self.samples if sample.batch in batches)

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
        """Number of samples whose tokens equal plain decoding."""
        return sum(sample.identical for sample in self.samples)

    @property
    def num_ties(self) -> int:
        """Number of samples that first differ from plain decoding at a numerical tie."""
        return sum(sample.tie for sample in self.samples)


@dataclass(frozen=True)
class BenchResult:
    """All contenders on the same prompts. Rates and ratios are over the batches in `counted`.

    A batch is one prompt if `batch_size` is 1.
    """

    entries: dict[str, Entry]
    left_out: dict[str, str]
    """Contenders that could not be measured, with the reasons."""
    counted: tuple[int, ...]
    num_prompts: int
    facts: dict[str, Any]
    """Task, device and versions as plain data."""
    remarks: tuple[str, ...] = ()
    batch_size: int = 1

    def rate(self, name: str, phase: Phase = Phase.DECODE) -> Interval:
        """Return the tokens per second over all sequences, with the 95 % interval over batches."""
        return self.entries[name].work(self.counted, phase).rate()

    def over(
        self, name: str, reference: str, phase: Phase = Phase.DECODE, batches: Sequence[int] | None = None
    ) -> Interval:
        """Return the paired speed-up of `name` over `reference`, with the 95 % interval over all or the given batches."""
        return self.ratio(name, reference, phase, self.counted if batches is None else batches).interval()

    def ratio(self, name: str, reference: str, phase: Phase, batches: Sequence[int]) -> Ratio:
        """Return the speed of `name` over that of `reference` on these batches."""
        slower, faster = (self.entries[each].work(batches, phase) for each in (reference, name))
        return Ratio.of_speeds(slower, faster)

    def prefill_over_plain(self, name: str) -> Interval:
        """Return the prefill seconds of `name` over plain decoding's, paired: above 1 by the share of its draft."""
        own, plain = (self.entries[each].time_to_first_token(self.counted) for each in (name, PLAIN))
        return paired_interval(own, plain)

    def time_to_first_token_seconds(self, name: str) -> float:
        """Return the mean prefill seconds over the counted batches."""
        return float(self.entries[name].time_to_first_token(self.counted).mean())


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


def mean_prompt_tokens(result: BenchResult) -> float:
    """Return the mean prompt length of the counted batches, in tokens."""
    samples = result.entries[PLAIN].samples
    lengths = {sample.prompt: sample.prompt_tokens for sample in samples if sample.batch in result.counted}
    return fmean(lengths.values())
