"""Paired measurement of candidates: real decoding, each prompt with plain decoding of the same prompt in the same process.

With a batch size above 1 the unit is a batch of prompts, decoded in lockstep both plainly and with the candidate. The bench
measures and compares tokens; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from transformers.generation import TemperatureLogitsWarper, TopPLogitsWarper

from decoding.acceptance import Greedy, Sampling
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import CostAwareRule, DraftLengthRule, RoundCosts
from decoding.drafts import Draft, PlainDecoding
from decoding.head_folder import HeadFolder
from decoding.losslessness import compare
from decoding.profile import Decoding
from decoding.target import Target
from decoding.text import LogitsProcessor, Shaping
from decoding.timing.draft_costs import measure_decoder_costs
from studies.contract import Candidate
from studies.measurement import BatchTexts, Measurement, PairedPrefill, PromptSample
from tuner.measuring.baseline import Baseline
from tuner.measuring.clock import Clock, WallClock
from tuner.measuring.contract import OnSample
from tuner.measuring.decoders import MOST_KEPT, DecoderPool
from tuner.measuring.machine import seconds_waited
from tuner.measuring.recording import Recorder, TimedBatch, counted, record_decoding
from tuner.measuring.turns import WARM_UP_TOKENS, take_turns


@dataclass(frozen=True, eq=False)
class _Contestant:
    """A draft and the decoder that uses it; compared by identity."""

    draft: Draft
    decoder: Decoder


MOST_TIMES_SLOWER = 20
"""A candidate that takes this many times as long as plain decoding is not measured."""
LEAST_SECONDS_TO_REFUSE = 0.1
"""Seconds per token below which a candidate is measured, however slow it is: it costs little, and other load may be the cause."""


class FarTooSlowError(Exception):
    """A candidate that is many times slower than plain decoding."""


class Bench:
    """A target, prompts with their plain continuations, and a clock.

    Every sequence of a candidate is compared with its plain continuation token by token. When sampling, both are decoded greedily
    once more for the comparison, outside the measured time: two sampled sequences cannot be compared.
    """

    def __init__(
        self,
        target: Target,
        baseline: Baseline,
        *,
        decoding: Decoding = Decoding(),
        heads: HeadFolder | None = None,
        seed: int = 0,
        clock: Clock | None = None,
        most_kept: int = MOST_KEPT,
        top_p: float = 1.0,
    ) -> None:
        """`clock` is real time unless given; a price list makes every measurement repeat exactly.

        When sampling, `top_p` is the share of the probability that is sampled from, as in `generate`. The decoders of the
        `most_kept` drafts measured last are kept: see `DecoderPool`.
        """
        self.target = target
        self.baseline = baseline
        self.decoding = decoding
        self._heads = heads
        self._seed = seed
        self._clock = clock or WallClock(target.device)
        self._plain = _Contestant(PlainDecoding(), plain_decoder(target))
        self._plain_batches: dict[int, TimedBatch] = {}
        self._costs: dict[Draft, RoundCosts] = {}
        self._most_kept, self._top_p = most_kept, top_p
        self._decoders = DecoderPool(target, decoding, heads=heads, most=most_kept)

    @property
    def indices(self) -> range:
        """Indices of the measurable prompts, or of their batches."""
        return self.baseline.indices

    @property
    def batch_size(self) -> int:
        """Number of prompts decoded in lockstep."""
        return self.baseline.batch_size

    @property
    def most_kept(self) -> int:
        """Number of drafts whose decoders are kept."""
        return self._most_kept

    @property
    def max_new_tokens(self) -> int:
        """Number of tokens after which a sequence ends."""
        return self.baseline.ending.max_new_tokens

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of the prompts."""
        return self.baseline.prompts

    @property
    def continuations(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of the plain greedy continuations."""
        return self.baseline.continuations

    def reordered(self, order: Sequence[int]) -> Bench:
        """Return a bench of the same prompts in another order; it measures the costs of drafts anew."""
        return self._of(self.baseline.reordered(order), self._most_kept)

    def keeping(self, most_kept: int) -> Bench:
        """Return a bench of the same prompts that keeps the decoders of this number of drafts; it measures their costs anew."""
        return self._of(self.baseline, most_kept)

    def _of(self, baseline: Baseline, most_kept: int) -> Bench:
        return Bench(
            self.target,
            baseline,
            decoding=self.decoding,
            heads=self._heads,
            seed=self._seed,
            clock=self._clock,
            most_kept=most_kept,
            top_p=self._top_p,
        )

    def measure(
        self, candidate: Candidate, indices: Sequence[int], on_sample: OnSample = lambda sample: None
    ) -> Measurement:
        """Measure one candidate and plain decoding, in turn, on the prompts or batches at `indices`.

        `on_sample` receives every sample as soon as it is complete, and may raise to stop.
        """
        (measured,) = self.side_by_side([candidate], indices, on_sample)
        return measured

    def side_by_side(
        self, candidates: Sequence[Candidate], indices: Sequence[int], on_sample: OnSample = lambda sample: None
    ) -> list[Measurement]:
        """Measure several candidates and plain decoding, in turn, on the prompts or batches at `indices`.

        Differences between the candidates are then differences on the same prompts at nearly the same time. `on_sample` receives
        every sample as soon as its prompt was decoded by all, and may raise to stop.
        """
        contestants = [_Contestant(candidate.draft, self.decoder(candidate)) for candidate in candidates]
        samples: list[list[PromptSample]] = [[] for _ in contestants]

        def keep(index: int, batches: Mapping[_Contestant, TimedBatch]) -> None:
            for contestant, taken in zip(contestants, samples, strict=True):
                taken.append(self._sample(contestant.decoder, index, batches[self._plain], batches[contestant]))
                on_sample(taken[-1])

        all_contestants = [self._plain, *contestants]
        if not self._clock.is_deterministic:
            for each in all_contestants:
                self._warm_up(each.decoder, indices[0])
            for each in contestants:
                self._refuse_far_too_slow(each.decoder, indices[0])
        try:
            take_turns(all_contestants, indices, self._timed, keep)
        except torch.OutOfMemoryError:
            self._decoders.clear()  # the next candidate needs the memory more
            raise
        return [Measurement(samples=tuple(taken)) for taken in samples]

    def warm_up_rule(self, candidate: Candidate, indices: Sequence[int]) -> Candidate:
        """Return the candidate with its cost-aware rule warmed up on the prompts at `indices`, costs included.

        The candidates of other rules are returned unchanged: where a moving threshold starts is a searched setting. In a batch,
        the rule of the first sequence is the one returned.
        """
        rule = candidate.draft_length
        if not isinstance(rule, CostAwareRule):
            return candidate
        decoder = self.decoder(candidate.with_rule(rule.model_copy(update={"persistent": True})))
        if not self._clock.is_deterministic:
            self._refuse_far_too_slow(decoder.with_rule(decoder.rule), indices[0])  # with a controller of its own
        for index in indices:
            decoder.generate_batch(self._requests(index))
        adapted = decoder.adapted_rule()
        assert adapted is not None, "a cost-aware rule with a persistent controller has adapted"
        return candidate.with_rule(adapted.model_copy(update={"persistent": rule.persistent}))

    def write(self, candidate: Candidate, index: int) -> list[tuple[int, ...]]:
        """Return the candidate's greedy continuations of the prompts of batch `index`, untimed."""
        written = self.decoder(candidate).generate_batch(self._greedy_requests(index))
        return [each.tokens for each in written.generations]

    def decoder(self, candidate: Candidate) -> Decoder:
        """Return a decoder of the candidate, with a fresh controller, prepared for all prompts."""
        decoder = self._decoders.get(candidate.draft, candidate.draft_length)
        self._prepare(self._plain.decoder)  # first, as it makes the memory, in which the costs are measured too
        decoder = decoder.with_rule(self._ready_rule(candidate, decoder))
        self._prepare(decoder)
        return decoder

    def _prepare(self, decoder: Decoder) -> None:
        """Let the decoder run every shape of pass that the prompts may need, so that none is new when time counts."""
        used = self._requests(0)[0].acceptance
        decoder.prepare(
            min(map(len, self.prompts)),
            max(map(len, self.prompts)) + self.max_new_tokens,
            self.batch_size,
            acceptances=[Greedy()] if used.is_greedy else [used, Greedy()],  # sampled runs are checked by greedy ones
        )

    def _ready_rule(self, candidate: Candidate, decoder: Decoder) -> DraftLengthRule:
        """Return the candidate's rule, with costs if it is cost-aware. The costs of a draft are measured once for all rules."""
        draft, rule = candidate.draft, candidate.draft_length
        if not isinstance(rule, CostAwareRule) or rule.costs is not None:
            return rule
        costs = self._costs.get(draft)
        if costs is None or len(costs.verify) <= rule.max_tokens:
            costs = measure_decoder_costs(decoder, rule.max_tokens, num_sequences=self.batch_size)
            if costs is None:  # plain decoding has none
                return rule
            self._costs[draft] = costs
        return rule.with_costs(costs)

    @property
    def _times_drafts(self) -> bool:
        """Whether seconds of drafting are part of the seconds measured: prices know whole rounds only."""
        return self.batch_size == 1 and not self._clock.is_deterministic

    def _warm_up(self, decoder: Decoder, index: int) -> float:
        """Decode a few tokens of each prompt; return the seconds per token after the prefill."""
        ending = replace(self.baseline.ending, max_new_tokens=WARM_UP_TOKENS)
        written = decoder.generate_batch([replace(each, ending=ending) for each in self._greedy_requests(index)])
        num_tokens = sum(each.num_decoded for each in written.generations)
        return written.decode_seconds / num_tokens if num_tokens else 0.0

    def _refuse_far_too_slow(self, decoder: Decoder, index: int) -> None:
        """Raise `FarTooSlowError` for a candidate that a few tokens show to be hopeless: measured in full, it could take hours."""
        seconds = self._warm_up(decoder, index)
        if seconds < LEAST_SECONDS_TO_REFUSE:
            return
        if seconds > MOST_TIMES_SLOWER * self._warm_up(self._plain.decoder, index):
            raise FarTooSlowError(
                f"{seconds:.2g} s for a token, more than {MOST_TIMES_SLOWER} times as long as plain decoding: not measured"
            )

    def _timed(self, contestant: _Contestant, index: int) -> TimedBatch:
        """Decode one batch and time it; plain decoding only once if the clock repeats exactly."""
        repeats = contestant is self._plain and self._clock.is_deterministic
        if repeats and index in self._plain_batches:
            return self._plain_batches[index]
        requests = self._requests(index)
        before = seconds_waited()
        recorder = Recorder(self._clock.start(contestant.draft), num_sequences=len(requests))
        record_decoding(contestant.decoder, requests, recorder)
        batch = recorder.batch()
        if self._clock.is_deterministic:
            batch = replace(batch, waited_seconds=0.0)  # no waiting is charged
        elif before is not None:
            batch = replace(batch, waited_seconds=max(0.0, (seconds_waited() or 0.0) - before))
        if repeats:
            self._plain_batches[index] = batch
        return batch

    def _sample(self, decoder: Decoder, index: int, plain: TimedBatch, drafted: TimedBatch) -> PromptSample:
        texts = self._compare(decoder, index, drafted)
        rounds = list(drafted.rounds)
        identical = texts.identical == texts.count
        return PromptSample(
            prompt=index,
            plain_seconds=plain.decode_seconds,
            plain_tokens=plain.num_decoded,
            draft_seconds=drafted.decode_seconds,
            draft_tokens=drafted.num_decoded,
            drafting_seconds=sum(each.draft_seconds for each in rounds) if self._times_drafts else None,
            rounds=len(rounds),
            drafted=sum(each.num_drafted for each in rounds),
            accepted=sum(each.num_accepted for each in rounds),
            waited_seconds=_both(plain.waited_seconds, drafted.waited_seconds),
            accepted_lengths=counted(each.num_accepted for each in rounds),
            prefill=PairedPrefill(
                plain_seconds=plain.prefill_seconds,
                plain_tokens=plain.prefill_tokens,
                draft_seconds=drafted.prefill_seconds,
                draft_tokens=drafted.prefill_tokens,
            ),
            category=self.baseline.category(index),
            identical=identical,
            tie=not identical and texts.identical + texts.ties == texts.count,
            float32_tie=0 < texts.float32_ties == texts.count - texts.identical - texts.ties,
            batch=texts if self.batch_size > 1 else None,
        )

    def _compare(self, decoder: Decoder, index: int, drafted: TimedBatch) -> BatchTexts:
        """Compare the sequences of a batch with their plain continuations; when sampling, by decoding it greedily once more."""
        tokens = [each.tokens for each in drafted.sequences]
        if self.decoding.temperature > 0:
            tokens = [each.tokens for each in decoder.generate_batch(self._greedy_requests(index)).generations]
        comparisons = [
            compare(self.target, self.prompts[row], self.continuations[row], written)
            for row, written in zip(self.baseline.members(index), tokens, strict=True)
        ]
        return BatchTexts(
            count=len(comparisons),
            identical=sum(each.identical for each in comparisons),
            ties=sum(each.tie for each in comparisons),
            float32_ties=sum(each.float32_tie for each in comparisons),
        )

    def _requests(self, index: int) -> list[Request]:
        """Return the requests of one batch at the bench's temperature, every one with the same seed."""
        requests = self._greedy_requests(index)
        if self.decoding.temperature == 0:
            return requests
        shaping = Shaping(self._processors())
        return [replace(each, acceptance=Sampling(self._generator()), shaping=shaping) for each in requests]

    def _processors(self) -> list[LogitsProcessor]:
        """Return the logits processors of sampling, in the order of `generate`."""
        temperature = TemperatureLogitsWarper(self.decoding.temperature)
        return [temperature] if self._top_p == 1.0 else [temperature, TopPLogitsWarper(self._top_p)]

    def _greedy_requests(self, index: int) -> list[Request]:
        return [Request(self.prompts[row], self.baseline.ending, Greedy()) for row in self.baseline.members(index)]

    def _generator(self) -> torch.Generator:
        return torch.Generator(self.target.device).manual_seed(self._seed)


def _both(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second
