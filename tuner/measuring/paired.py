"""Paired measurement of candidates: real decoding, each prompt with plain decoding of the same prompt in the same process.

With a batch size above 1 the unit is a batch of prompts, decoded in lockstep both plainly and with the candidate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.generation import TemperatureLogitsWarper

from decoding.acceptance import Acceptance, Greedy, Sampling
from decoding.cache.known_prompt import KnownPrompt
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import CostAwareRule, DraftLengthRule, RoundCosts
from decoding.drafts import Draft
from decoding.drafts.history import RequestHistory
from decoding.head_folder import HeadFolder
from decoding.losslessness import Comparison, compare
from decoding.profile import Decoding
from decoding.rounds import Prefill
from decoding.target import Target
from decoding.text import Ending, Shaping
from decoding.timing.round_costs import measure_round_costs
from studies.contract import Candidate
from studies.measurement import Measurement, PromptSample
from tuner.measuring.baseline import Baseline
from tuner.measuring.contender import PLAIN, Clock, Decoded, Prompts, Recorder, WallClock
from tuner.measuring.machine import seconds_waited
from tuner.measuring.turns import WARM_UP_TOKENS, Interleaved, OnSample, PairedBench, Texts

MOST_TIMES_SLOWER = 20
"""A candidate that takes this many times as long as plain decoding is not measured."""
LEAST_SECONDS_TO_REFUSE = 0.1
"""Seconds per token below which a candidate is measured, however slow it is: it costs little, and other load may be the cause."""


MOST_KEPT = 6
"""Drafts whose decoders are kept. The finalists of a race take turns: fewer than their number would keep none of them."""


class FarTooSlowError(Exception):
    """A candidate that is many times slower than plain decoding."""


@dataclass(frozen=True)
class SamplingSettings:
    """How requests are sampled: temperature as in `generate`, every sequence with the same seed."""

    temperature: float
    seed: int = 0

    def acceptance(self, device: torch.device) -> Sampling:
        """Return the choice of tokens, with a fresh generator."""
        return Sampling(torch.Generator(device).manual_seed(self.seed))

    def requests(self, greedy: Sequence[Request], device: torch.device) -> list[Request]:
        """Return the requests, sampled."""
        shaping = Shaping([TemperatureLogitsWarper(self.temperature)])
        return [replace(each, acceptance=self.acceptance(device), shaping=shaping) for each in greedy]


class OwnDecoding:
    """A decoder with our own loop and cache; see `Contender`.

    The baseline, named `PLAIN`, is not compared with itself, and by a clock that repeats exactly it decodes a batch only once.
    """

    def __init__(
        self,
        name: str,
        decoder: Decoder,
        eos_token_ids: frozenset[int],
        *,
        description: str = "",
        settings: Mapping[str, Any] | None = None,
        sampling: SamplingSettings | None = None,
        clock: Clock | None = None,
        known: Mapping[tuple[int, ...], KnownPrompt] = {},
        history: int = 0,
    ) -> None:
        """Decode greedily unless `sampling` is given; `clock` is real time unless given.

        The pass over a prompt that is `known` was timed when it was read, and is charged again without being run. A draft that
        reads a `history` has that many tokens of the answers so far, until a prompt comes again.
        """
        self.name, self.description, self.settings = name, description, settings or {}
        self.decoder = decoder
        self._eos, self._sampling, self._prompts_known = eos_token_ids, sampling, known
        self._clock = clock or WallClock(decoder.target.device)
        self._known: dict[tuple[object, int], Decoded] = {}
        reads = history > 0 and decoder.draft.reads_history
        self._history = RequestHistory(max_tokens=history) if reads else None
        self._answered: set[tuple[int, ...]] = set()

    def prepare(self, batches: Sequence[Prompts], max_new_tokens: int) -> None:
        """See `Contender.prepare`: every shape of pass that the batches may need runs once."""
        lengths = [len(prompt) for batch in batches for prompt in batch]
        for num_sequences in {len(batch) for batch in batches}:
            self.decoder.prepare(min(lengths), max(lengths) + max_new_tokens, num_sequences)

    def decode(self, prompts: Prompts, max_new_tokens: int) -> Decoded:
        """See `Contender.decode`. A sampled run is followed by a greedy one, which is not timed."""
        key = tuple(map(tuple, prompts)), max_new_tokens
        if key in self._known:
            return self._known[key]
        ending = Ending(max_new_tokens, self._eos)
        greedy = requests = [
            Request(prompt, ending, Greedy(), known=self._prompts_known.get(tuple(prompt))) for prompt in prompts
        ]
        if self._sampling is not None:
            requests = self._sampling.requests(greedy, self.decoder.target.device)
        requests = [replace(each, history=self._history_for(each.prompt)) for each in requests]
        before = seconds_waited()
        recorder = Recorder(self._clock.start(self.decoder.draft), num_sequences=len(requests))
        prefill_seconds = 0.0
        for sequence, step in self.decoder.batch_steps(requests):
            if isinstance(step, Prefill):
                recorder.put((step.token,), sequence)
                prefill_seconds += step.seconds
            else:
                recorder.put(step.tokens, sequence, step)
        found = recorder.decoded()
        if self._clock.is_deterministic:  # prices know whole rounds only, and no waiting is charged
            found = replace(found, drafting_seconds=None, waited_seconds=0.0)
        elif before is not None:
            found = replace(found, waited_seconds=max(0.0, (seconds_waited() or 0.0) - before))
        if not self._clock.is_deterministic and self._recalls(requests):
            found = replace(found, prefill_seconds=prefill_seconds)
        if self._sampling is not None and self.name != PLAIN:  # two sampled sequences cannot be compared
            texts = tuple(each.tokens for each in self.decoder.generate_batch(greedy).generations)
            found = replace(found, texts=texts)
        if self._clock.is_deterministic and self.name == PLAIN:
            self._known[key] = found
        if self._history is not None and max_new_tokens > WARM_UP_TOKENS:
            for prompt, text in zip(prompts, found.texts, strict=True):
                self._answered.add(tuple(prompt))
                self._history.add(text)
        return found

    def _history_for(self, prompt: Sequence[int]) -> RequestHistory | None:
        """Return the history; an emptied one for a prompt whose own answer is in it."""
        if self._history is not None and tuple(prompt) in self._answered:
            self._history.clear()
            self._answered.clear()
        return self._history

    def _recalls(self, requests: Sequence[Request]) -> bool:
        drafter = self.decoder.drafter
        return any(each.known is not None for each in requests) and (drafter is None or not drafter.has_head)


class Bench(PairedBench):
    """A target, prompts with their plain continuations, and a clock.

    Every sequence of a candidate is compared with its plain continuation token by token: the baseline's, or, where that has none,
    the one that was timed beside it. When sampling, it is decoded greedily once more for the comparison, outside the measured
    time, and the baseline must have continuations: two sampled sequences cannot be compared.
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
    ) -> None:
        """`clock` is real time unless given; a price list makes every measurement repeat exactly.

        The decoders of the `most_kept` drafts measured last are kept, so that what a runner has prepared for them is not prepared
        again.
        """
        if decoding.temperature > 0 and not baseline.continuations:
            raise ValueError("sampled sequences are compared by the baseline's continuations, and it has none")
        super().__init__(baseline, self._compare)
        self.target = target
        self.decoding = decoding
        self._heads = heads
        self._seed = seed
        self._clock = clock or WallClock(target.device)
        self._costs: dict[Draft, RoundCosts] = {}
        self._most_kept = most_kept
        self._decoders: OrderedDict[Draft, Decoder] = OrderedDict()
        self._sampling = SamplingSettings(decoding.temperature, seed) if decoding.temperature > 0 else None
        self._plain = self._contender(PLAIN, plain_decoder(target))

    def reordered(self, order: Sequence[int]) -> Bench:
        """Return a bench of the same prompts in another order; it measures the costs of drafts anew."""
        return Bench(
            self.target,
            self.baseline.reordered(order),
            decoding=self.decoding,
            heads=self._heads,
            seed=self._seed,
            clock=self._clock,
            most_kept=self._most_kept,
        )

    def measure(
        self, candidate: Candidate, indices: Sequence[int], on_sample: OnSample = lambda sample: None
    ) -> Measurement:
        """Measure one candidate and plain decoding, in turn, on the prompts or batches at `indices`.

        `on_sample` receives every sample as soon as it is complete, and may raise to stop.
        """
        return self.side_by_side([candidate], indices, on_sample)[0]

    def side_by_side(
        self, candidates: Sequence[Candidate], indices: Sequence[int], on_sample: OnSample = lambda sample: None
    ) -> list[Measurement]:
        """Measure several candidates and plain decoding, in turn, as `measure` does.

        Differences between the candidates are then differences on the same prompts at nearly the same time. A sample is shown once
        its prompt was decoded by all.
        """
        with self._contenders(candidates, indices) as own:
            found = self.compete(Interleaved([self._plain, *own]), indices, _shown(on_sample))
            return [found[each.name] for each in own]

    @contextmanager
    def _contenders(self, candidates: Sequence[Candidate], indices: Sequence[int]) -> Iterator[list[OwnDecoding]]:
        """Yield the candidates as contenders, warmed up like plain decoding. Raises `FarTooSlowError`."""
        own = [self._contender(str(number), self.decoder(each)) for number, each in enumerate(candidates)]
        if not self._clock.is_deterministic:
            for contender in (self._plain, *own):
                self._warm_up(contender.decoder, indices[0])
            for contender in own:
                self._refuse_far_too_slow(contender.decoder, indices[0])
        try:
            yield own
        except torch.OutOfMemoryError:
            self._decoders.clear()  # the next candidate needs the memory more
            raise

    def _contender(self, name: str, decoder: Decoder) -> OwnDecoding:
        eos = self.baseline.ending.eos_token_ids
        return OwnDecoding(
            name,
            decoder,
            eos,
            sampling=self._sampling,
            clock=self._clock,
            known=self.baseline.known,
            history=self.decoding.history,
        )

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
            requests = self._greedy_requests(index)
            decoder.generate_batch(
                self._sampling.requests(requests, self.target.device) if self._sampling else requests
            )
        adapted = decoder.adapted_rule()
        assert adapted is not None, "a cost-aware rule with a persistent controller has adapted"
        return candidate.with_rule(adapted.model_copy(update={"persistent": rule.persistent}))

    def decoder(self, candidate: Candidate) -> Decoder:
        """Return a decoder of the candidate, with a fresh controller, prepared for all prompts."""
        draft = candidate.draft
        if draft not in self._decoders:
            self._decoders[draft] = Decoder(
                self.target, draft, candidate.draft_length, self.decoding, heads=self._heads
            )
        decoder = self._decoders[draft]
        self._decoders.move_to_end(draft)
        while len(self._decoders) > self._most_kept:
            self._decoders.popitem(last=False)
        self._prepare(self._plain.decoder)  # first, as it makes the memory, in which the costs are measured too
        decoder = decoder.with_rule(self._ready_rule(candidate, decoder))
        self._prepare(decoder)
        return decoder

    def _prepare(self, decoder: Decoder) -> None:
        """Let the decoder run every shape of pass that the prompts may need, so that none is new when time counts."""
        acceptances: list[Acceptance] = [Greedy()]  # sampled runs are checked by greedy ones
        if self._sampling is not None:
            acceptances.insert(0, self._sampling.acceptance(self.target.device))
        decoder.prepare(
            min(map(len, self.prompts)),
            max(map(len, self.prompts)) + self.max_new_tokens,
            self.batch_size,
            acceptances=acceptances,
        )

    def _ready_rule(self, candidate: Candidate, decoder: Decoder) -> DraftLengthRule:
        """Return the candidate's rule, with costs if it is cost-aware. The costs of a draft are measured once for all rules."""
        draft, rule = candidate.draft, candidate.draft_length
        if not isinstance(rule, CostAwareRule) or rule.costs is not None:
            return rule
        costs = self._costs.get(draft)
        if decoder.drafter is None:
            return rule
        if costs is None or len(costs.verify) <= rule.max_tokens:
            costs = measure_round_costs(self.target, decoder.drafter, rule.max_tokens, num_sequences=self.batch_size)
            self._costs[draft] = costs
        return rule.with_costs(costs)

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

    def _compare(self, name: str, row: int, texts: Texts) -> Comparison:
        plain = self.continuations[row] if self.continuations else texts[PLAIN]
        return compare(self.target, self.prompts[row], plain, texts[name])

    def _greedy_requests(self, index: int) -> list[Request]:
        known = self.baseline.known
        return [Request(prompt, self.baseline.ending, known=known.get(tuple(prompt))) for prompt in self.batch(index)]


def _shown(on_sample: OnSample) -> Callable[[Mapping[str, PromptSample]], None]:
    def show(samples: Mapping[str, PromptSample]) -> None:
        for sample in samples.values():
            on_sample(sample)

    return show
