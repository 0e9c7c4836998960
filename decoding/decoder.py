"""A draft and a rule applied to a loaded target, for profiles, candidates and the command line."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from functools import partial
from weakref import WeakKeyDictionary

from decoding.acceptance import Acceptance, Greedy
from decoding.cache.kv_cache import Storage
from decoding.decode import NewCache, autoregressive, capacity_for, speculative
from decoding.draft_length import Controller, DraftLengthRule, Fixed
from decoding.drafters.build import build_drafter
from decoding.drafters.contract import Drafter
from decoding.drafts import Draft, PlainDecoding
from decoding.head_folder import HeadFolder
from decoding.lockstep import decode_in_lockstep, shared_batch_size
from decoding.profile import Decoding
from decoding.rehearsal import Contexts, Rehearsal, Steering
from decoding.rounds import BatchGeneration, Generation, Prefill, Round
from decoding.target import Target
from decoding.text import Request


class Decoder:
    """Decodes sequences with a draft and a rule. Each sequence has a fresh controller, unless the rule is `persistent`.

    Threads may share a decoder. With a `persistent` rule, sequences at the same time have controllers of their own, each of which
    goes on with a later sequence.

    A rule that weighs costs must have them: see `decoding.timing.round_costs.with_measured_costs`. Raises ValueError for layers
    that the target does not have, and `ExitHeadError` for a missing or wrong head.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft,
        rule: DraftLengthRule,
        decoding: Decoding = Decoding(),
        *,
        heads: HeadFolder | None = None,
    ) -> None:
        self.target = target
        self.rule = rule
        self.draft = draft
        self.drafter = build_drafter(target, draft, decoding, heads=heads)
        """Proposes and verifies drafts; None for plain decoding."""
        self._prepared: WeakKeyDictionary[Storage, set[tuple[Steering, Contexts, bool]]] = WeakKeyDictionary()
        """What was rehearsed, by the memory that the runner prepared it for."""
        self._kept: dict[int, list[Controller]] = {}
        """Controllers that no sequence is using, by row of the batch: sequences must not observe one another's rounds."""

    def prepare(
        self, shortest: int, longest: int, num_sequences: int = 1, *, acceptances: Sequence[Acceptance] = (Greedy(),)
    ) -> None:
        """Run every shape of pass that may occur in sequences of these lengths, so that none is new when time counts.

        `shortest` is the length of the shortest prompt and `longest` the length of the longest sequence, in tokens.
        Memory for the longest sequence is made first. Does nothing the second time, and nothing with a runner without
        fixed shapes. Raises ValueError for impossible lengths.
        """
        contexts = Contexts(shortest, longest, num_sequences)
        if self.target.runner.buckets is None:
            return
        self.target.follow_weights()
        steering = Steering(0) if self.drafter is None else Steering.of(self.rule.controller(), self.draft)
        done = self._prepared.setdefault(self.reserve(contexts), set())
        for acceptance in acceptances:
            key = steering, contexts, acceptance.is_greedy
            if key not in done:
                Rehearsal(self.target, self.drafter, steering, contexts, acceptance).run()
                done.add(key)

    def reserve(self, contexts: Contexts) -> Storage:
        """Let the runner make memory for sequences of these lengths; return the first sequence's."""
        runner, num_layers, num_rows = self.target.runner, self.target.num_layers, contexts.num_sequences
        if shared_batch_size(self.target, num_rows) > 1:
            return runner.new_cache(num_layers, contexts.capacity + 1, num_rows).storage
        # Sequences that cannot share passes take turns, each with memory of its own.
        caches = [runner.new_cache(num_layers, contexts.capacity) for _ in range(num_rows)]
        return caches[0].storage

    def with_rule(self, rule: DraftLengthRule) -> Decoder:
        """Return a decoder of the same draft with another rule.

        Both run the same parts of the model, so that what is prepared for one is prepared for the other. They share no
        controller.
        """
        other = copy.copy(self)
        other.rule, other._kept = rule, {}
        return other

    def adapted_rule(self) -> DraftLengthRule | None:
        """Return the rule with the state of its persistent controller, or None without one or if the rule does not adapt.

        In a batch the controller belongs to the first sequence.
        """
        kept = self._kept.get(0)
        return kept[0].adapted_rule() if kept else None

    @property
    def max_drafted(self) -> int:
        """Most positions that a round adds to a sequence."""
        return 0 if self.drafter is None else self.rule.max_tokens

    def steps(self, request: Request) -> Iterator[Prefill | Round]:
        """Decode one sequence, yielding a record of the prefill and of each round as it happens."""
        return self.loop(request, 0, self.target.new_cache)

    def batch_steps(self, requests: Sequence[Request]) -> Iterator[tuple[int, Prefill | Round]]:
        """Decode a batch in lockstep (`decoding.lockstep`), yielding each record with the row of its sequence."""
        capacity = max((capacity_for(self.target, request, self.max_drafted) for request in requests), default=0)
        loops = [partial(self.loop, request, row) for row, request in enumerate(requests)]
        return decode_in_lockstep(self.target, loops, capacity)

    def generate(self, request: Request) -> Generation:
        return Generation.collect(self.steps(request))

    def generate_batch(self, requests: Sequence[Request]) -> BatchGeneration:
        """Decode a batch in lockstep to its end; each sequence equals the one that `generate` returns."""
        start = read = time.perf_counter()
        records: list[list[Prefill | Round]] = [[] for _ in requests]
        for row, step in self.batch_steps(requests):
            records[row].append(step)
            if isinstance(step, Prefill):
                read = time.perf_counter()
        generations = tuple(Generation.collect(steps) for steps in records)
        return BatchGeneration(generations, read - start, time.perf_counter() - read)

    def loop(
        self, request: Request, row: int, new_cache: NewCache, *, fresh: bool = False
    ) -> Iterator[Prefill | Round]:
        """Return the loop that decodes a sequence in `row` of a batch, with the cache that `new_cache` makes.

        `fresh` gives it a controller of its own even if the rule is persistent: its drafts then depend on nothing that came before.
        """
        if self.drafter is None:
            return autoregressive(self.target, request, new_cache)
        return self._speculative(self.drafter, request, row, new_cache, fresh=fresh)

    def _speculative(
        self, drafter: Drafter, request: Request, row: int, new_cache: NewCache, *, fresh: bool
    ) -> Iterator[Prefill | Round]:
        free = [] if fresh or not self.rule.persistent else self._kept.setdefault(row, [])
        try:
            controller = free.pop()
        except IndexError:  # none yet, or all in use
            controller = self.rule.controller()
        try:
            yield from speculative(self.target, drafter, controller, request, new_cache)
        finally:
            free.append(controller)


def plain_decoder(target: Target) -> Decoder:
    return Decoder(target, PlainDecoding(), Fixed())
