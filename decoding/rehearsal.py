"""Rehearsal: every shape of pass that decoding may need runs once, before anything is timed.

A runner of fixed-shape passes compiles and records a shape when it first meets it, which takes as long as many passes.
Within a measurement that would be charged to the decoding that meets the shape first: a candidate, not plain decoding.

The loops of `decoding.decode` rehearse real rounds, so that any kind of draft is prepared without being known. Their
sequences repeat one token, and only pretend to have been read up to where a shape changes (our formulation).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice, pairwise

import torch
from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.cache.kv_cache import KVCache
from decoding.decode import NewCache, ReadPrompt, autoregressive, speculative
from decoding.draft_length import Controller, Decision, DraftDistribution
from decoding.drafters.contract import Drafter, Proposal
from decoding.drafters.prompt_lookup import LookupFirst, steered_part
from decoding.drafts import Draft
from decoding.lockstep import decode_in_lockstep
from decoding.rounds import Prefill, Round
from decoding.runners.buckets import Buckets
from decoding.runners.contract import Outputs
from decoding.target import Target
from decoding.text import Ending, Request, TokenSequence

TOKEN = 0
"""The token that the sequences repeat: a prompt lookup finds it everywhere."""
MOST_DRAFTED = 64
"""Most tokens that any rule or lookup drafts in a round."""


@dataclass(frozen=True)
class Contexts:
    """Lengths of the sequences that are going to be decoded."""

    shortest: int
    """Tokens of the shortest prompt."""
    longest: int
    """Tokens of the longest sequence, prompt and new tokens."""
    num_sequences: int = 1
    """Sequences in lockstep."""

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest or self.num_sequences < 1:
            raise ValueError(
                f"sequences need a shortest prompt from 1 to the longest length, and one sequence at least; got {self}"
            )

    @property
    def capacity(self) -> int:
        """Positions for the longest sequence with the widest pass of any rule: no other candidate needs more."""
        return self.longest + MOST_DRAFTED + 2


@dataclass(frozen=True)
class Steering:
    """What a rule may do to a round, as far as it decides about shapes of passes."""

    max_tokens: int
    looks: bool = False
    """True if it looks at distributions, so that tokens are drafted one by one."""
    may_stop: bool = False
    """True if it may drop a token whose pass has run."""
    may_pause: bool = False
    """True if several rounds in a row may draft nothing."""
    rereads: bool = False
    """True if a head reads all positions of a round again, as after quantised blocks."""

    @classmethod
    def of(cls, controller: Controller, draft: Draft) -> Steering:
        return cls(
            controller.max_tokens,
            controller.looks_at_drafts,
            controller.may_stop,
            may_pause=controller.may_pause,
            rereads=draft.trained_head is not None and draft.trained_head.rereads,
        )


@dataclass(frozen=True)
class _Scene:
    """Rounds to rehearse, on sequences of `start` tokens."""

    start: int
    lengths: tuple[int, ...]
    """Tokens to draft in each round."""
    stops: bool = False
    """True to drop another token, whose pass has run, in each round."""
    pending: tuple[int, ...] = ()
    """For each row, the positions that an exit head lacks before the last round; empty for those that it lacks anyway."""

    @property
    def ending(self) -> Ending:
        """The ending that lets the first round draft exactly its number of tokens."""
        return Ending(1 + sum(length + 1 + self.stops for length in self.lengths))


def starts(buckets: Buckets, first: int, last: int) -> list[int]:
    """Return the lengths from `first` to `last` at which passes begin to read another number of slots, and both ends.

    A pass that begins there, however wide, reads as many slots as any pass of its width does up to the next one.
    """
    if last < first:
        return []
    found = [first]
    while (edge := buckets.reach(found[-1] + 1)) < last:
        found.append(edge)
    return found if found[-1] == last else [*found, last]


class Rehearsal:
    """Rounds of one drafter, or plain decoding without one, on sequences of these lengths."""

    def __init__(
        self, target: Target, drafter: Drafter | None, steering: Steering, contexts: Contexts, acceptance: Acceptance
    ) -> None:
        self._target, self._drafter, self._steering = target, drafter, steering
        self._contexts, self._acceptance = contexts, acceptance
        self._num_rows = contexts.num_sequences
        self._readers = [_Reader(self._read_prompt) for _ in range(self._num_rows)]
        self._has_pending = False

    @torch.inference_mode()
    def run(self) -> None:
        """Rehearse every kind of round at every length that changes its shapes.

        Where nothing is recorded, one round of each kind is enough: it compiles what it needs.
        """
        if self._drafter is None:
            self._play_all([_Scene(start, (0,)) for start in self._starts(0)], None)
            return
        steered = steered_part(self._drafter)
        self._rehearse_lengths(steered)
        if self._steering.may_stop:
            self._rehearse_stops(steered)
        if self._looks_up:
            self._rehearse_lookups(self._drafter)
            if isinstance(self._drafter, LookupFirst) and self._drafter.lookup.checks_copies:
                self._rehearse_checks(steered)
        self._rehearse_pending(steered)

    def _rehearse_lengths(self, drafter: Drafter) -> None:
        longest = self._steering.max_tokens
        for length in range(longest + 1) if self._is_thorough else sorted({0, 1, longest}):
            self._play_all([_Scene(start, (length,)) for start in self._starts(length)], drafter)

    def _rehearse_stops(self, drafter: Drafter) -> None:
        for length in range(self._steering.max_tokens) if self._is_thorough else (0, 1):
            self._play_all([_Scene(start, (length,), stops=True) for start in self._starts(length + 1)], drafter)

    def _rehearse_lookups(self, drafter: Drafter) -> None:
        """Let a lookup copy any number of tokens, up to its own limit."""
        for length in range(1, MOST_DRAFTED + 1) if self._is_thorough else (1,):
            rounds = self._play_all([_Scene(start, (length,)) for start in self._starts(length)], drafter)
            if not any(each.looked_up and each.num_drafted == length for each in rounds):
                return

    def _rehearse_checks(self, drafter: Drafter) -> None:
        """Let the drafter check copies of any number of tokens, if it can and may do so."""
        if self._steering.looks or self._num_rows > 1 or not self._acceptance.is_greedy:
            return
        longest = self._steering.max_tokens
        for width in range(2, longest + 1) if self._is_thorough else sorted({min(2, longest), longest}):
            scenes = [_Scene(start, (width,)) for start in self._starts(width)]
            self._play_all(scenes, _Checking(drafter, width - 1))

    def _rehearse_pending(self, drafter: Drafter) -> None:
        """Let an exit head catch up with any number of positions, as after rounds that it did not draft in."""
        for number in self._pending_numbers():
            first = self._contexts.shortest + number - 1
            for start in self._starts(1, first=first, num_rounds=2):
                self._play(_Scene(start, (0, 1), pending=(number,) * self._num_rows), drafter)
                if not self._has_pending:
                    return
                if self._num_rows > 1:  # the one that lacks most determines the width, another one the reach
                    others = (1,) * (self._num_rows - 1)
                    self._play(_Scene(start, (0, 1), pending=(number, *others)), drafter)

    def _pending_numbers(self) -> list[int]:
        """Return the fewest and the most pending positions for each width of a pass."""
        lags = self._steering.may_pause or self._steering.rereads or self._looks_up
        if not (self._is_thorough and lags):
            return [1]
        widths = pairwise(self._buckets.widths)
        numbers = sorted({number for narrower, wider in widths for number in (narrower, wider - 1)})
        return [number for number in numbers if self._contexts.shortest + number + 3 <= self._contexts.longest]

    def _starts(self, length: int, *, first: int | None = None, num_rounds: int = 1) -> list[int]:
        """Return the lengths at which to rehearse rounds that draft `length` tokens."""
        first = self._contexts.shortest if first is None else first
        last = self._contexts.longest - 1 - num_rounds
        if self._num_rows == 1:
            last -= length  # the last token is never drafted
        elif (room := self._target.context_length) is not None:
            last = min(last, room - 1 - num_rounds - length)  # other rows may draft less, further on
        found = starts(self._buckets, first, last)
        return found if self._is_thorough and not self._target.runner.reads_all_slots else found[:1]

    def _play_all(self, scenes: Sequence[_Scene], drafter: Drafter | None) -> list[Round]:
        return [each for scene in scenes for each in self._play(scene, drafter)]

    def _play(self, scene: _Scene, drafter: Drafter | None) -> list[Round]:
        """Rehearse one scene in all rows and return the rounds of the first."""
        loops = [partial(self._loop, scene, drafter, row) for row in range(self._num_rows)]
        if self._num_rows == 1:
            records = list(loops[0](self._target.new_cache))
        else:
            steps = decode_in_lockstep(self._target, loops, self._contexts.capacity)
            records = [record for row, record in steps if row == 0]
        return [record for record in records if isinstance(record, Round)]

    def _loop(self, scene: _Scene, drafter: Drafter | None, row: int, new_cache: NewCache) -> Iterator[Prefill | Round]:
        request, read = Request([TOKEN] * scene.start, scene.ending, self._acceptance), self._readers[row]
        if drafter is None:
            steps = autoregressive(self._target, request, new_cache, read)
        else:
            staged = _Staged(drafter, read, scene.pending[row] if scene.pending else None)
            controller_class = _LookingLengths if self._steering.looks else _Lengths
            controller = controller_class(self._steering.max_tokens, scene.lengths, stops=scene.stops)
            steps = speculative(self._target, staged, controller, request, new_cache)
        yield from islice(steps, 1 + len(scene.lengths))
        if drafter is not None:
            self._has_pending |= staged.has_pending

    def _read_prompt(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        if self._drafter is not None:
            return self._drafter.prefill(sequence, cache)
        return self._target.forward(sequence.span(0, sequence.length), cache, 0, last_only=True)

    @property
    def _looks_up(self) -> bool:
        """True if a lookup comes before the drafter that the rule steers."""
        return self._drafter is not None and steered_part(self._drafter) is not self._drafter

    @property
    def _is_thorough(self) -> bool:
        return self._target.runner.records

    @cached_property
    def _buckets(self) -> Buckets:
        buckets = self._target.runner.buckets
        assert buckets is not None, "only a runner of fixed-shape passes is rehearsed with"
        return buckets


class _Reader:
    """Reads the first tokens of one prompt, which makes the memory ready, and pretends to have read all of any other."""

    def __init__(self, read: ReadPrompt) -> None:
        self._read = read
        self._logits: Tensor | None = None
        self._pending: Tensor | None = None

    def __call__(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        """Return logits [1, vocabulary] by which `TOKEN` comes next."""
        if self._logits is None:
            beginning = sequence.token_ids[:2]
            logits = self._read(TokenSequence(beginning, len(beginning), sequence.span(0, 1).device), cache)
            self._logits = torch.full_like(logits, -1e4)
            self._logits[..., TOKEN] = 1e4
            self._pending = cache.branch.pending
        cache.pretend(sequence.length, self._pending)
        return self._logits


class _Staged(Drafter):
    """A drafter on a sequence that is only pretended to have been read."""

    def __init__(self, drafter: Drafter, read: ReadPrompt, num_pending: int | None) -> None:
        self._drafter, self._read, self._num_pending = drafter, read, num_pending
        self.has_pending = False
        """True if states were pending, so that `num_pending` meant something."""

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        return self._read(sequence, cache)

    def draft(
        self, sequence: TokenSequence, cache: KVCache, controller: Controller, request: Request, limit: int
    ) -> Proposal:
        if self._num_pending is not None:
            self.has_pending |= cache.pretend_pending(self._num_pending)
        return self._drafter.draft(sequence, cache, controller, request, limit)

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        return self._drafter.verify(sequence, cache, draft)


class _Checking(Drafter):
    """A drafter that checks a copy of `num_copied` tokens at the beginning of each round, if it can."""

    def __init__(self, drafter: Drafter, num_copied: int) -> None:
        self._drafter, self._num_copied = drafter, num_copied

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        return self._drafter.prefill(sequence, cache)

    def draft(
        self, sequence: TokenSequence, cache: KVCache, controller: Controller, request: Request, limit: int
    ) -> Proposal:
        def copy(drafts: Sequence[int], num_tokens: int) -> list[int] | None:
            return None if drafts else [TOKEN] * min(num_tokens, self._num_copied)

        checked = self._drafter.draft_checking(sequence, cache, controller, limit, copy)
        return checked or Proposal(0, None)

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        return self._drafter.verify(sequence, cache, draft)


class _Lengths(Controller):
    """Drafts given numbers of tokens, round by round."""

    def __init__(self, max_tokens: int, lengths: Sequence[int], *, stops: bool = False) -> None:
        super().__init__(max_tokens)
        self._coming = iter(lengths)
        self._stops = stops
        self._length = 0

    def limit(self) -> int:
        """Return the length of the round; a token more if it stops, which is not drafted."""
        self._length = next(self._coming, 0)
        return self._length + self._stops


class _LookingLengths(_Lengths):
    """Looks at every token, and may drop one."""

    def decide(self, num_drafted: int, distribution: DraftDistribution) -> Decision:
        """Read the distribution as a rule would, then stop where the draft is to end."""
        is_over = distribution.top_probability >= 0.0 and self._stops and num_drafted == self._length
        return Decision.STOP if is_over else Decision.CONTINUE
