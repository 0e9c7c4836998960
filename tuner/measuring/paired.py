"""Measures candidates by real decoding, each prompt paired with plain decoding of the same prompt in the same process.

With a batch size above 1 it is batches that are measured, each of the same few prompts in step, plainly and with the candidate.
Only `Bench` looks at a clock's results; it decides nothing. Warm-up, interleaving and the comparison of tokens are here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation import TemperatureLogitsWarper

from decoding.acceptance import Greedy, Sampling
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import CostAwareRule, DraftLengthRule, RoundCosts
from decoding.drafts import Draft
from decoding.exit_heads import ExitHeads
from decoding.losslessness import compare
from decoding.profile import Decoding
from decoding.rounds import BatchGeneration
from decoding.target import Target
from decoding.text import Ending, Shaping
from decoding.timing.draft_costs import measure_draft_costs
from decoding.timing.stopwatch import Stopwatch, without_garbage_collection
from studies.contract import Candidate
from studies.measurement import BatchTexts, Measurement, PromptSample
from tuner.errors import DatasetError

WARM_UP_TOKENS = 8
FEWEST_DECODED = 8  # a text that ends sooner says nothing about the rate of decoding

OnSample = Callable[[PromptSample], None]


class Bench:
    """A target, some prompts, and plain decoding's text of each.

    What is measured on are `indices`: at each are `batch_size` of the prompts, in the order given. Those left over, too few for
    another batch, are left out: they would be decoded at another speed.

    Every candidate is compared with plain decoding token by token, text by text; when sampling, by a greedy run of both on the
    side, as two sampled texts cannot be compared.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        decoding: Decoding = Decoding(),
        eos_token_ids: frozenset[int] = frozenset(),
        heads: ExitHeads | None = None,
        seed: int = 0,
        batch_size: int = 1,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.target = target
        self.batch_size = batch_size
        self.max_new_tokens = max_new_tokens
        self.decoding = decoding
        self._eos = eos_token_ids
        self._heads = heads
        self._seed = seed
        self._costs: dict[Draft, RoundCosts] = {}
        self._plain = plain_decoder(target)
        self._watch = Stopwatch(target.device)
        self.prompts: list[tuple[int, ...]] = []
        self.greedy_texts: list[tuple[int, ...]] = []
        self.rows: list[int] = []
        """Which of the prompts given each of these is: texts that end too soon are left out."""
        for row, prompt in enumerate(prompts):
            text = self._plain.generate(self._request(prompt, greedy=True))
            on_progress()
            if text.num_decoded >= FEWEST_DECODED:
                self.rows.append(row)
                self.prompts.append(tuple(prompt))
                self.greedy_texts.append(text.tokens)
        self.num_too_short = len(prompts) - len(self.prompts)
        self.num_left_over = len(self.prompts) % batch_size
        """Prompts that make no whole batch."""
        for kept in (self.rows, self.prompts, self.greedy_texts):
            del kept[len(kept) - self.num_left_over :]
        if len(self.indices) < 2:
            needed = "" if batch_size == 1 else f", and {2 * batch_size} longer ones make two batches of {batch_size}"
            raise DatasetError(
                f"{self.num_too_short} of {len(prompts)} prompts end within {FEWEST_DECODED} tokens of plain decoding{needed}: "
                "give prompts that the model continues at greater length"
            )

    @property
    def indices(self) -> range:
        """Indices of the measurable prompts, or of the batches of them."""
        return range(len(self.prompts) // self.batch_size)

    def reordered(self, order: Sequence[int]) -> Bench:
        """A bench of these prompts in another order, that knows nothing yet of what drafts cost."""
        other = copy.copy(self)
        other._costs = {}
        other.prompts = [self.prompts[index] for index in order]
        other.greedy_texts = [self.greedy_texts[index] for index in order]
        other.rows = [self.rows[index] for index in order]
        return other

    def measure(
        self, candidate: Candidate, indices: Sequence[int], on_sample: OnSample = lambda sample: None
    ) -> Measurement:
        """Decode the prompts at `indices` with the candidate and plainly, in turn; `on_sample` sees each and may raise to stop."""
        decoder = self._decoder(candidate)
        samples = []
        with without_garbage_collection():
            self._warm_up(decoder, indices[0])
            for turn, index in enumerate(indices):
                samples.append(self._sample(decoder, index, plain_first=turn % 2 == 0))
                on_sample(samples[-1])
        return Measurement(samples=tuple(samples))

    def warm_up_rule(self, candidate: Candidate, indices: Sequence[int]) -> Candidate:
        """The candidate, its rule starting with what it learns from the prompts at `indices` and with the costs measured here.

        Only a rule that weighs costs is taught; any other comes back as it is. Of a batch, what the first text teaches is learnt.
        """
        rule = candidate.draft_length
        if not isinstance(rule, CostAwareRule):
            return candidate
        pupil = self._decoder(candidate.with_rule(rule.model_copy(update={"persistent": True})))
        for index in indices:
            self._decode(pupil, index)
        learnt = pupil.adapted_rule()
        assert learnt is not None, "a persistent controller of a cost-aware rule has learnt"
        return candidate.with_rule(learnt.model_copy(update={"persistent": rule.persistent}))

    def _decoder(self, candidate: Candidate) -> Decoder:
        return Decoder(self.target, candidate.draft, self._ready_rule(candidate), self.decoding, heads=self._heads)

    def _ready_rule(self, candidate: Candidate) -> DraftLengthRule:
        """The candidate's rule with costs, if it weighs any. The costs of a draft are measured once for all rules."""
        draft, rule = candidate.draft, candidate.draft_length
        if not isinstance(rule, CostAwareRule) or rule.costs is not None:
            return rule
        costs = self._costs.get(draft)
        if costs is None or len(costs.verify) <= rule.max_tokens:
            costs = measure_draft_costs(
                self.target, draft, rule.max_tokens, self.decoding, heads=self._heads, num_texts=self.batch_size
            )
            if costs is None:  # plain decoding has none
                return rule
            self._costs[draft] = costs
        return rule.with_costs(costs)

    def _warm_up(self, decoder: Decoder, index: int) -> None:
        for each in (self._plain, decoder):
            self._decode(each, index, greedy=True, max_new_tokens=WARM_UP_TOKENS)

    def side_by_side(
        self, candidates: Sequence[Candidate], indices: Sequence[int], on_sample: OnSample = lambda sample: None
    ) -> list[Measurement]:
        """Decode each prompt at `indices` plainly and with every candidate, in an order that moves on by one from prompt to prompt.

        Differences between the candidates are then differences on the same text at nearly the same time.
        """
        decoders = [self._decoder(candidate) for candidate in candidates]
        samples: list[list[PromptSample]] = [[] for _ in decoders]
        order = [self._plain, *decoders]
        with without_garbage_collection():
            for decoder in decoders:
                self._warm_up(decoder, indices[0])
            for turn, index in enumerate(indices):
                first = turn % len(order)
                done = {each: self._timed(each, index) for each in [*order[first:], *order[:first]]}
                for decoder, taken in zip(decoders, samples, strict=True):
                    taken.append(self._compare(decoder, index, done[self._plain], done[decoder]))
                    on_sample(taken[-1])
        return [Measurement(samples=tuple(taken)) for taken in samples]

    def _sample(self, decoder: Decoder, index: int, *, plain_first: bool) -> PromptSample:
        order = (self._plain, decoder) if plain_first else (decoder, self._plain)
        done = {each: self._timed(each, index) for each in order}
        return self._compare(decoder, index, done[self._plain], done[decoder])

    def _compare(self, decoder: Decoder, index: int, plain: BatchGeneration, drafted: BatchGeneration) -> PromptSample:
        comparisons = [
            compare(self.target, self.prompts[row], self.greedy_texts[row], tokens)
            for row, tokens in zip(self._rows_at(index), self._greedy_tokens(decoder, index, drafted), strict=True)
        ]
        texts = BatchTexts(
            count=len(comparisons),
            identical=sum(each.identical for each in comparisons),
            ties=sum(each.tie for each in comparisons),
        )
        identical = texts.identical == texts.count
        return PromptSample(
            prompt=index,
            plain_seconds=plain.decode_seconds,
            plain_tokens=plain.num_decoded,
            draft_seconds=drafted.decode_seconds,
            draft_tokens=drafted.num_decoded,
            rounds=sum(len(text.rounds) for text in drafted.generations),
            drafted=sum(text.num_drafted for text in drafted.generations),
            accepted=sum(text.num_accepted for text in drafted.generations),
            identical=identical,
            tie=not identical and all(each.is_lossless for each in comparisons),
            batch=texts if self.batch_size > 1 else None,
        )

    def _timed(self, decoder: Decoder, index: int) -> BatchGeneration:
        """A generation whose times are whole: every round ends by reading its tokens, so no work is left on the device."""
        self._watch.synchronize()
        return self._decode(decoder, index)

    def _greedy_tokens(self, decoder: Decoder, index: int, drafted: BatchGeneration) -> list[tuple[int, ...]]:
        greedy = drafted if self.decoding.temperature == 0 else self._decode(decoder, index, greedy=True)
        return [text.tokens for text in greedy.generations]

    def _decode(self, decoder: Decoder, index: int, **how: Any) -> BatchGeneration:
        """The prompts at an index: one by itself, several in step. For `how` see `_request`."""
        requests = [self._request(self.prompts[row], **how) for row in self._rows_at(index)]
        if self.batch_size == 1:
            return BatchGeneration.of_one(decoder.generate(requests[0]))
        return decoder.generate_batch(requests)

    def _rows_at(self, index: int) -> range:
        """Which of the prompts are decoded at an index."""
        return range(index * self.batch_size, (index + 1) * self.batch_size)

    def _request(self, prompt: Sequence[int], *, greedy: bool = False, max_new_tokens: int | None = None) -> Request:
        ending = Ending(max_new_tokens or self.max_new_tokens, self._eos)
        if greedy or self.decoding.temperature == 0:
            return Request(prompt, ending, Greedy())
        generator = torch.Generator(self.target.device).manual_seed(self._seed)
        return Request(
            prompt, ending, Sampling(generator), Shaping((TemperatureLogitsWarper(self.decoding.temperature),))
        )
