"""Measurements of candidates: real speculative decoding, paired prompt by prompt with plain decoding.

Where prompts are decoded in lockstep, a sample is a batch, and every statement about prompts holds for batches. All samples are
kept; rates, speed-ups and intervals are derived from them. Data only: `tuner.measuring.paired` fills it.

Names and definitions of acceptance are AIPerf's (`SpecDecodeAcceptanceRecord`), its step being our round. We count each round of
the decode phase, also those that draft nothing: they cost a pass of the target like any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import TypeVar

import numpy as np
from pydantic import Field

from decoding.documents.strict_yaml import Document
from decoding.profile import Interval
from studies.ratios import Ratio, Work, geometric_mean, paired_interval

DocumentT = TypeVar("DocumentT", bound=Document)

MOST_WAITING = 0.05
"""Share of its time that decoding may wait for a processor on a machine that counts as quiet."""
LEVEL, LEVEL_OF_BUSY = 0.95, 0.995
"""Level of the interval that must lie above 1 for a speed-up to be claimed, on a quiet machine and on a busy one.

On a busy machine times have heavy tails, searches are repeated until they seem to say something, and what is claimed wrongly is as
large as the noise: 1.07 and 1.10 were claimed for plain decoding under other names, in 2 of 22 searches.
"""


class BatchTexts(Document):
    """Sequences of a batch: their number, and how many equal plain decoding or differ from it at a numerical tie."""

    count: int = Field(ge=1)
    identical: int = Field(ge=0)
    ties: int = Field(ge=0)
    float32_ties: int = Field(0, ge=0, exclude_if=lambda count: count == 0)
    """Sequences that differ at a tie in float32, which is no excuse."""


class PairedPrefill(Document):
    """The prefill phase of both decodings: until every sequence has its first tokens, which count here.

    A candidate's prefill includes what its draft does with the prompt: an exit head computes keys and values of its own.
    """

    plain_seconds: float
    plain_tokens: int
    draft_seconds: float
    draft_tokens: int


class PromptSample(Document):
    """One prompt decoded twice in the same process: plainly and with the candidate. Seconds are of the decode phase.

    Or one batch of prompts in lockstep: seconds are of the whole batch, counts are sums over its sequences.
    """

    prompt: int
    """Index in the bench."""
    plain_seconds: float
    plain_tokens: int
    draft_seconds: float
    draft_tokens: int
    drafting_seconds: float | None = None
    """Part of `draft_seconds` spent drafting; None for batches, which draft together, and for prices."""
    rounds: int
    drafted: int | None
    """None for code of others, which keeps no records: its rounds are all passes, and accept what each adds beyond a token."""
    accepted: int
    identical: bool
    """True if the candidate's tokens equal plain decoding (when sampling: in a greedy run of both)."""
    tie: bool = False
    """True if not identical, but the first differing token is a numerical tie of the target's logits; in a batch, if this
    holds for every sequence that is not identical."""
    float32_tie: bool = Field(False, exclude_if=lambda tie: not tie)
    """True if every sequence that is neither identical nor a tie first differs at a numerical tie in float32: a difference."""
    batch: BatchTexts | None = None
    prefill: PairedPrefill | None = None
    """None by a clock that does not charge prefills."""
    waited_seconds: float | None = Field(None, exclude_if=lambda seconds: seconds is None)
    """Seconds of both decodings, prefill included, in which threads were ready to run and waited for a processor; None where the
    system does not say."""
    accepted_lengths: tuple[int, ...] = ()
    """Number of rounds that accepted 0, 1, 2 ... drafted tokens."""
    category: str | None = None
    """Category of the prompt, or of all prompts of the batch; None without one, and for a batch of several categories."""

    @property
    def texts(self) -> BatchTexts:
        """Counts of the sequences of the sample."""
        return self.batch or BatchTexts(count=1, identical=int(self.identical), ties=int(self.tie))

    @property
    def total_seconds(self) -> float:
        """Seconds of both decodings, prefill included."""
        prefill = 0.0 if self.prefill is None else self.prefill.plain_seconds + self.prefill.draft_seconds
        return self.plain_seconds + self.draft_seconds + prefill

    @property
    def ratio(self) -> float:
        """Plain seconds per token over candidate seconds per token; above 1 the candidate is faster."""
        return (self.plain_seconds / self.plain_tokens) / (self.draft_seconds / self.draft_tokens)


class Measurement(Document):
    """Samples of one candidate, and the figures derived from them."""

    samples: tuple[PromptSample, ...]

    @cached_property
    def plain_decode(self) -> Work:
        """Decode phase of plain decoding, by sample."""
        return Work.of((s.plain_seconds, s.plain_tokens) for s in self.samples)

    @cached_property
    def draft_decode(self) -> Work:
        """Decode phase of the candidate, by sample."""
        return Work.of((s.draft_seconds, s.draft_tokens) for s in self.samples)

    @property
    def speedup(self) -> float:
        """Decode-phase tokens per second of the candidate over those of plain decoding."""
        return self.draft_decode.tokens_per_second / self.plain_decode.tokens_per_second

    def speedup_interval(self) -> Interval:
        """Return the speed-up with its paired 95 % interval over prompts; raise ValueError for fewer than two prompts."""
        return Ratio.of_speeds(self.plain_decode, self.draft_decode).interval()

    def is_faster(self, *, busy: bool = False) -> bool:
        """Return True if decoding is faster than plain decoding beyond what the noise of the machine can produce.

        The interval of the speed-up must lie above 1, at a higher level if the machine was `busy` or these samples had to wait.
        """
        return Ratio.of_speeds(self.plain_decode, self.draft_decode).bounds(self.level(busy=busy))[0] > 1.0

    def level(self, *, busy: bool = False) -> float:
        """Return the level of the interval that `is_faster` asks for."""
        return LEVEL_OF_BUSY if busy or (self.waiting_share or 0.0) > MOST_WAITING else LEVEL

    @property
    def waiting_share(self) -> float | None:
        """Share of the time of all decodings in which they waited for a processor; None if no sample knows."""
        known = [s for s in self.samples if s.waited_seconds is not None]
        total = sum(s.total_seconds for s in known)
        return min(1.0, sum(s.waited_seconds or 0.0 for s in known) / total) if total else None

    @cached_property
    def end_to_end(self) -> EndToEnd | None:
        """Figures with the prefill; None if a sample has no prefill, or there are fewer than two samples."""
        timed = [(s, s.prefill) for s in self.samples if s.prefill is not None]
        return EndToEnd(timed) if len(timed) == len(self.samples) >= 2 else None

    @property
    def is_slower_end_to_end(self) -> bool:
        """True if the 95 % interval of the end-to-end speed-up lies below 1; False if prefills are unknown."""
        return self.end_to_end is not None and self.end_to_end.speedup_interval().ci95[1] < 1.0

    @property
    def plain_tokens_per_second(self) -> float:
        """Decode-phase rate of plain decoding over all prompts."""
        return self.plain_decode.tokens_per_second

    @property
    def draft_tokens_per_second(self) -> float:
        """Decode-phase rate of the candidate over all prompts."""
        return self.draft_decode.tokens_per_second

    @property
    def drafting_share(self) -> float | None:
        """Share of the decode phase spent drafting, the rest being verification; None if a sample does not have it."""
        known = [s.drafting_seconds for s in self.samples if s.drafting_seconds is not None]
        total = sum(s.draft_seconds for s in self.samples)
        return sum(known) / total if total and len(known) == len(self.samples) else None

    @property
    def num_spec_steps(self) -> int:
        """Number of rounds."""
        return sum(s.rounds for s in self.samples)

    @property
    def num_draft_tokens(self) -> int:
        """Number of drafted tokens that are known of."""
        return sum(s.drafted or 0 for s in self.samples)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Number of drafted tokens that the target agreed with, also after the end of a text."""
        return sum(s.accepted for s in self.samples)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 when nothing was drafted."""
        drafted = self.num_draft_tokens
        return self.num_accepted_draft_tokens / drafted if drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round by the target's agreement: 1 + accepted tokens per round; 1 without any round."""
        rounds = self.num_spec_steps
        return 1.0 + (self.num_accepted_draft_tokens / rounds if rounds else 0.0)

    @property
    def acceptance_histogram(self) -> dict[int, int]:
        """Number of rounds by the number of drafted tokens they accepted; numbers without a round are left out."""
        counts: Counter[int] = Counter()
        for sample in self.samples:
            counts.update(dict(enumerate(sample.accepted_lengths)))
        return {length: count for length, count in sorted(counts.items()) if count}

    @property
    def tokens_per_round(self) -> float:
        """Mean number of tokens that a round adds; `mean_acceptance_length` less what lies after the ends of texts."""
        rounds = self.num_spec_steps
        return sum(s.draft_tokens for s in self.samples) / rounds if rounds else 0.0

    @property
    def drafted_per_round(self) -> float:
        """Mean number of tokens that a round drafts."""
        rounds = self.num_spec_steps
        return self.num_draft_tokens / rounds if rounds else 0.0

    def by_category(self) -> dict[str, Measurement]:
        """Return the samples of each category, in the order of first appearance; samples without a category are left out."""
        found: dict[str, list[PromptSample]] = {}
        for sample in self.samples:
            if sample.category is not None:
                found.setdefault(sample.category, []).append(sample)
        return {name: Measurement(samples=tuple(samples)) for name, samples in found.items()}

    @property
    def num_prompts(self) -> int:
        """Number of decoded sequences; a prompt counts as often as it was decoded."""
        return sum(s.texts.count for s in self.samples)

    @property
    def batch_size(self) -> int:
        """Number of prompts decoded in lockstep."""
        return max((s.texts.count for s in self.samples), default=1)

    @property
    def num_identical(self) -> int:
        """Number of sequences equal to plain decoding."""
        return sum(s.texts.identical for s in self.samples)

    @property
    def num_ties(self) -> int:
        """Number of sequences that differ from plain decoding at a numerical tie."""
        return sum(s.texts.ties for s in self.samples)

    @property
    def num_different(self) -> int:
        """Number of sequences that differ from plain decoding's, ties apart."""
        return self.num_prompts - self.num_identical - self.num_ties

    @property
    def is_lossless(self) -> bool:
        """True if every sequence equals plain decoding or differs from it at a numerical tie."""
        return all(s.identical or s.tie for s in self.samples)


class EndToEnd:
    """Figures of whole decodings: prefill and decode phase of two or more samples.

    End-to-end seconds are AIPerf's request latency, and the prefill's are its time to first token; of a batch, until its last
    sequence has its first token.
    """

    def __init__(self, samples: Sequence[tuple[PromptSample, PairedPrefill]]) -> None:
        self.plain = Work.of((s.plain_seconds + p.plain_seconds, s.plain_tokens + p.plain_tokens) for s, p in samples)
        """Plain decoding, by sample."""
        self.draft = Work.of((s.draft_seconds + p.draft_seconds, s.draft_tokens + p.draft_tokens) for s, p in samples)
        """The candidate, by sample."""
        self._plain_prefill = np.array([prefill.plain_seconds for _, prefill in samples])
        self._draft_prefill = np.array([prefill.draft_seconds for _, prefill in samples])

    def speedup_interval(self) -> Interval:
        """Return the tokens per second of the candidate over those of plain decoding, with the paired 95 % interval."""
        return Ratio.of_speeds(self.plain, self.draft).interval()

    @property
    def plain_time_to_first_token_seconds(self) -> float:
        """Mean prefill seconds of plain decoding."""
        return float(np.mean(self._plain_prefill))

    @property
    def time_to_first_token_seconds(self) -> float:
        """Mean prefill seconds of the candidate, with what its draft does with the prompt."""
        return float(np.mean(self._draft_prefill))

    def prefill_over_plain(self) -> Interval | None:
        """Return the candidate's prefill seconds over plain decoding's, paired; None by a clock that does not charge prefills.

        What lies above 1 is the share of the draft, such as the keys and values of an exit head.
        """
        if not np.all(self._plain_prefill > 0):
            return None
        return paired_interval(self._draft_prefill, self._plain_prefill)


def geometric_means(categories: Mapping[str, Measurement]) -> tuple[Interval, Interval | None] | None:
    """Return the geometric means of the categories' speed-ups: decode phase, and end to end if prefills are known.

    None if a category has fewer than two samples, or there are no two categories.
    """
    if len(categories) < 2 or any(len(each.samples) < 2 for each in categories.values()):
        return None
    decode = [Ratio.of_speeds(each.plain_decode, each.draft_decode) for each in categories.values()]
    whole = [each.end_to_end for each in categories.values()]
    ratios = [Ratio.of_speeds(each.plain, each.draft) for each in whole if each is not None]
    return geometric_mean(decode), geometric_mean(ratios) if len(ratios) == len(whole) else None


def sum_repeats(samples: Iterable[PromptSample]) -> Measurement:
    """Return a measurement with the samples of each prompt added up: repeats say nothing about other prompts."""
    of_prompts: dict[int, list[PromptSample]] = {}
    for sample in samples:
        of_prompts.setdefault(sample.prompt, []).append(sample)
    return Measurement(samples=tuple(map(_sum, of_prompts.values())))


def _sum(samples: Sequence[PromptSample]) -> PromptSample:
    first, *others = samples
    if not others:
        return first
    summed = (
        *("plain_seconds", "plain_tokens", "draft_seconds", "draft_tokens", "drafting_seconds"),
        *("rounds", "drafted", "accepted", "waited_seconds"),
    )
    texts, prefills = [each.texts for each in samples], [each.prefill for each in samples if each.prefill is not None]
    lengths = zip_longest(*(each.accepted_lengths for each in samples), fillvalue=0)
    return first.model_copy(
        update={
            **{name: _total([getattr(each, name) for each in samples]) for name in summed},
            "accepted_lengths": tuple(map(sum, lengths)),
            "prefill": _sum_fields(prefills) if len(prefills) == len(samples) else None,
            "identical": all(each.identical for each in samples),
            "tie": all(each.identical or each.tie for each in samples) and not all(each.identical for each in samples),
            "float32_tie": all(each.identical or each.tie or each.float32_tie for each in samples)
            and any(each.float32_tie for each in samples),
            "batch": _sum_fields(texts),
        }
    )


def _sum_fields(documents: Sequence[DocumentT]) -> DocumentT:
    kind = type(documents[0])
    return kind(**{name: _total([getattr(each, name) for each in documents]) for name in kind.model_fields})


def _total(values: Sequence[float | None]) -> float | None:
    """Return the sum, None if a value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def pooled(measurements: Sequence[Measurement]) -> Measurement:
    """Return one measurement with all samples of several measurements of one candidate."""
    return Measurement(samples=tuple(sample for measurement in measurements for sample in measurement.samples))
