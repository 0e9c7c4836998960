"""Replay of a draft-length rule on a recording of a draft: its cost and gain, without the model.

Our formulation. A recording holds, for each position of a sequence written by the target, whether the draft would have drafted the
target's token there, and its confidence; both are teacher forced, from one pass over the sequence. Greedy rounds then equal the
rounds of decoding, with two exceptions: distributions after a rejected draft, where a real draft is on a path of its own, and
drafts that reach past the end of a sequence. A replay is a prediction: it may choose what to measure, and is never reported as a
measurement.

In lockstep, by the schedule of `decoding.lockstep`, sequences draft until all wait for their verification. Sequences that need
different parts of the model (one copies, another resumes after the prefix) cannot share a pass. A shared pass costs as much as its
most expensive request, for some of the sequences as for all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from decoding.draft_length import Controller, CostAwareRule, Decision, DraftDistribution, DraftLengthRule, RoundCosts
from decoding.drafts import Draft
from decoding.profile import Decoding


@dataclass(frozen=True)
class _Seen:
    """The properties of a `DraftDistribution` that rules read, as recorded."""

    top_probability: float
    entropy: float


@dataclass(frozen=True)
class TargetText:
    """The target's distributions over a sequence, kept for comparison with many drafts."""

    probabilities: Tensor
    """[positions, vocabulary], at the temperature of the search; at temperature 1 if it is greedy. In float16: with a large
    vocabulary these are the largest tensors of a search, and three digits suffice to compare drafts."""
    most_likely: Tensor
    """[positions]"""

    @classmethod
    def of(cls, logits: Tensor, decoding: Decoding = Decoding()) -> TargetText:
        """Return the distributions of logits [positions, vocabulary]. Raises ValueError without positions."""
        if not len(logits):
            raise ValueError("a recording needs a sequence of at least one token after the prefill's")
        probabilities = torch.softmax(logits.float() / (decoding.temperature or 1.0), dim=-1)
        return cls(probabilities.half(), logits.argmax(dim=-1))

    @property
    def num_positions(self) -> int:
        """Number of tokens that a draft has to predict."""
        return len(self.most_likely)


@dataclass(frozen=True)
class Recording:
    """One sequence as a draft saw it, from the token after the prefill's on; one entry per position."""

    matches: tuple[bool, ...]
    """True where the draft would have been accepted."""
    seen: tuple[_Seen, ...]
    acceptance: float
    """Mean over the positions of sum over v of min(p, q)."""

    @property
    def agreement(self) -> float:
        """Share of positions at which the draft would have been accepted."""
        return sum(self.matches) / len(self.matches)

    @classmethod
    def of(cls, target: Tensor, draft: Tensor, decoding: Decoding = Decoding(), *, seed: int = 0) -> Recording:
        """Return the recording of target and draft logits [positions, vocabulary] at the same positions; see `against`."""
        return cls.against(TargetText.of(target, decoding), draft, decoding, seed=seed)

    @classmethod
    def against(
        cls,
        target: TargetText,
        draft: Tensor,
        decoding: Decoding = Decoding(),
        *,
        seed: int = 0,
    ) -> Recording:
        """Return the recording of draft logits [positions, vocabulary] against the target's distributions.

        Greedy drafts match where both have the same most likely token. At a temperature, they match with probability sum over v of
        min(p, q), drawn once with `seed`, so that two drafts with the same seed share the draws.
        """
        q = torch.softmax(draft.float() / (decoding.temperature or 1.0), dim=-1)
        overlap = torch.minimum(target.probabilities.float(), q).sum(dim=-1)
        greedy = target.most_likely == draft.argmax(dim=-1)
        matches = draws(len(overlap), seed) < overlap.cpu() if decoding.temperature else greedy
        entropy = torch.special.entr(q).sum(dim=-1)
        seen = zip(q.amax(dim=-1).tolist(), entropy.tolist(), strict=True)
        return cls(tuple(matches.tolist()), tuple(_Seen(*pair) for pair in seen), float(overlap.mean()))


def draws(count: int, seed: int) -> Tensor:
    """Return uniform random numbers [count] in [0, 1), one per position, the same for all drafts compared with `seed`."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


class Guessed(NamedTuple):
    """The tokens that were guessed at one position."""

    num_right: int
    """Number of leading tokens that would be accepted."""
    num_tokens: int
    """Number of tokens."""


Copies = Sequence[Guessed | None]
"""What was guessed at each position of a sequence; None where nothing was."""


@dataclass(frozen=True)
class Replayed:
    """Tokens, rounds and draft passes of a replay, and their cost in plain passes of the target.

    A plain pass in lockstep writes one token of each sequence; its cost is divided among them as in plain decoding.
    """

    tokens: int
    rounds: int
    draft_passes: int
    cost: float
    costs_per_token: tuple[float, ...] = ()
    """Cost per token of each sequence, or of each batch in lockstep."""
    plain_passes: tuple[int, ...] = ()
    """Passes of plain decoding for each of them; empty if all cost the same."""

    @property
    def speedup(self) -> float:
        """Predicted speed-up over plain decoding, whose tokens cost 1 each."""
        return self.tokens / self.cost

    def speedup_on(self, texts: Sequence[int]) -> float:
        """Return the speed-up on some of the sequences (or batches): as in a measurement, long ones count for more."""
        passes = {text: self.plain_passes[text] if self.plain_passes else 1 for text in texts}
        costs = sum(self.costs_per_token[text] * passes[text] for text in texts)
        return sum(passes[text] for text in texts) / costs


class ReplayedRound(NamedTuple):
    """One round of a replay: tokens drafted, draft passes run (one more if the last was not drawn from), tokens accepted."""

    num_drafted: int
    num_passes: int
    num_accepted: int
    looked_up: bool = False
    widening: float = 0.0
    """Cost of checking several tokens in a draft pass beyond that of single ones, in draft steps."""


class Asked(NamedTuple):
    """A pass that a sequence asks for."""

    part: Hashable
    """Part of the model; only passes over the same part are shared."""
    verifies: bool
    cost: float
    """In plain passes, if all sequences of the batch ask for the same."""


@dataclass(frozen=True)
class LockstepBatches:
    """Batches of sequences in lockstep, and the facts of the draft that decide which passes are shared."""

    batches: tuple[tuple[int, ...], ...]
    resumes: bool = False
    """True if drafts are verified from the end of the shared prefix on; rounds without a draft run the whole model."""
    has_head: bool = False
    """True if an exit head drafts whose first pass of a round may, but need not, also process a pending token."""

    def of_draft(self, draft: Draft, decoding: Decoding) -> LockstepBatches:
        """Return the same batches with this draft, decoded as `decoding` says."""
        resumes = decoding.prefix_reuse and draft.num_shared_blocks > 0
        head = draft.trained_head
        has_head = head is not None and not head.rereads
        return LockstepBatches(self.batches, resumes=resumes, has_head=has_head)

    def asked(self, rounds: Iterable[ReplayedRound], costs: RoundCosts, copied: RoundCosts | None) -> Iterator[Asked]:
        """Yield the passes of a sequence's rounds; for `copied` see `cost_unbatched`."""
        is_pending = False
        for step in rounds:
            for number in range(step.num_passes):
                takes_along = self.has_head and is_pending and number == 0
                yield Asked(("draft", takes_along), False, costs.draft_step)
            is_pending = step.looked_up or step.num_accepted == step.num_drafted
            if step.looked_up:
                yield Asked("whole", True, _cost_of_copy(step, costs, copied))
                continue
            knows_last = step.num_passes > step.num_drafted
            part = ("resumed", knows_last) if self.resumes and step.num_passes else "whole"
            yield Asked(part, True, costs.verify_cost(step.num_drafted))


def cost_unbatched(step: ReplayedRound, costs: RoundCosts, copied: RoundCosts | None) -> float:
    """Return the cost of a round of a single sequence, in plain passes.

    `copied` holds the costs of rounds that the whole target verifies: those copied by the lookup before the draft. None if the
    lookup is the draft.
    """
    if step.looked_up:
        return _cost_of_copy(step, costs, copied)
    passes = step.num_passes - step.num_drafted + step.widening
    return costs.of(step.num_drafted) + passes * costs.draft_step


def _cost_of_copy(step: ReplayedRound, costs: RoundCosts, copied: RoundCosts | None) -> float:
    return costs.of(step.num_drafted) if copied is None else copied.verify_cost(step.num_drafted)


def passes_in_lockstep(texts: Iterable[Iterator[Asked]]) -> Iterator[tuple[Asked, ...]]:
    """Yield the shared passes in the order of `decoding.lockstep`: the requests of the sequences in each."""
    writing = dict(enumerate(texts))
    asked: dict[int, Asked] = {}

    def ask(row: int) -> None:
        wanted = next(writing[row], None)
        if wanted is not None:
            asked[row] = wanted

    for row in writing:
        ask(row)
    while asked:
        drafting = [each.part for each in asked.values() if not each.verifies]
        part = (drafting or [each.part for each in asked.values()])[0]
        shared = {row: each for row, each in sorted(asked.items()) if each.part == part}
        yield tuple(shared.values())
        for row in shared:
            del asked[row]
        for row in shared:
            ask(row)


def cost_in_lockstep(texts: Iterable[Iterator[Asked]]) -> float:
    """Return the cost of all shared passes, in plain passes."""
    return sum(max(each.cost for each in shared) for shared in passes_in_lockstep(texts))


def batches_of(indices: Sequence[int], batch_size: int) -> dict[int, tuple[int, ...]]:
    """Return the batches of the sequences at `indices`: positions within `indices`, by the batch's number."""
    batches: dict[int, tuple[int, ...]] = {}
    for number, index in enumerate(indices):
        batch = index // batch_size
        batches[batch] = (*batches.get(batch, ()), number)
    return batches


@dataclass(frozen=True)
class LookupReplay:
    """A lookup before a draft: its copies on each sequence, their length, and the cost of verifying n tokens."""

    copies: Sequence[Copies]
    max_tokens: int
    verify: RoundCosts
    """Costs of passes of the whole target; the draft step is not used."""
    checked: LookupReplay | None = None
    """The copies that the draft checks, if it does. Its passes are taken to cost more with their width as the target's do."""

    def at(self, text: int, position: int, room: int) -> Guessed | None:
        """Return the copy at a position, of at most `room` tokens, or None if there is none."""
        copy = self.copies[text][position] if room else None
        if copy is None:
            return None
        num_tokens = min(self.max_tokens, room, copy.num_tokens)
        return Guessed(min(copy.num_right, num_tokens), num_tokens)


def replay(
    rule: DraftLengthRule,
    recordings: Sequence[Recording],
    costs: RoundCosts,
    lookup: LookupReplay | None = None,
    lockstep: LockstepBatches | None = None,
    *,
    max_drafted: int | None = None,
) -> Replayed:
    """Replay `rule` over the recorded sequences, each with a fresh controller unless the rule is persistent.

    The rule is not asked about rounds that `lookup` drafts. With `lockstep`, its batches share passes and `costs` are the costs of
    batched passes; without it, each sequence is decoded by itself. `max_drafted` is the most tokens that a verification
    can take, if limited.
    """

    def rounds(controller: Controller, text: int) -> Iterator[ReplayedRound]:
        return _rounds(controller, recordings[text], lookup, text, max_drafted)

    lengths = [len(recording.matches) for recording in recordings]
    return _replay(rule, lengths, rounds, costs, lookup.verify if lookup else None, lockstep)


def replay_copies(
    rule: DraftLengthRule,
    copies: Sequence[Copies],
    costs: RoundCosts,
    lockstep: LockstepBatches | None = None,
    *,
    max_drafted: int | None = None,
) -> Replayed:
    """Replay `rule` over guessed tokens: a draft that runs no model, such as prompt lookup alone.

    `costs` are the costs of passes of the whole target. See `replay` for the other arguments.
    """

    def rounds(controller: Controller, text: int) -> Iterator[ReplayedRound]:
        return _copied_rounds(controller, copies[text], max_drafted)

    return _replay(rule, [len(text) for text in copies], rounds, costs, None, lockstep)


def _replay(
    rule: DraftLengthRule,
    lengths: Sequence[int],
    rounds_of: Callable[[Controller, int], Iterator[ReplayedRound]],
    costs: RoundCosts,
    copied: RoundCosts | None,
    lockstep: LockstepBatches | None,
) -> Replayed:
    """Return the replay of sequences with these lengths and rounds; for `copied` see `cost_unbatched`."""
    if isinstance(rule, CostAwareRule):
        rule = rule.with_costs(costs)
    lockstep = lockstep or LockstepBatches(tuple((text,) for text in range(len(lengths))))
    controllers: dict[int, Controller] = {}
    num_rounds = num_passes = 0

    def counted(steps: Iterable[ReplayedRound]) -> Iterator[ReplayedRound]:
        nonlocal num_rounds, num_passes
        for step in steps:
            num_rounds += 1
            num_passes += step.num_passes
            yield step

    total, per_token, plain_passes = 0.0, list[float](), list[int]()
    for batch in lockstep.batches:
        texts = []
        for row, text in enumerate(batch):
            if not rule.persistent or row not in controllers:
                controllers[row] = rule.controller()
            texts.append(counted(rounds_of(controllers[row], text)))
        paid = costs.looking() if controllers[0].looks_at_drafts else costs
        if len(texts) == 1:
            cost = sum(cost_unbatched(step, paid, copied) for step in texts[0])
        else:
            cost = cost_in_lockstep(lockstep.asked(steps, paid, copied) for steps in texts)
        # Plain decoding takes one pass per token of the longest sequence in the batch.
        num_plain = max(lengths[text] for text in batch)
        total += cost * (sum(lengths[text] for text in batch) / num_plain)
        per_token.append(cost / num_plain)
        plain_passes.append(num_plain)
    return Replayed(sum(lengths), num_rounds, num_passes, total, tuple(per_token), tuple(plain_passes))


def _rounds(
    controller: Controller,
    recording: Recording,
    lookup: LookupReplay | None,
    text: int,
    max_drafted: int | None,
) -> Iterator[ReplayedRound]:
    position, end = 0, len(recording.matches)
    while position < end:
        room = _room(end - position, max_drafted)
        copy = None if lookup is None else lookup.at(text, position, room)
        if copy is not None:
            step = ReplayedRound(copy.num_tokens, 0, copy.num_right, looked_up=True)
        else:
            checked = None if lookup is None or controller.looks_at_drafts else lookup.checked
            if checked is not None:
                step = _checked_round(controller, recording, text, position, room, checked)
            else:
                step = _drafted_round(controller, recording, position, room)
        yield step
        position += step.num_accepted + 1


def _drafted_round(controller: Controller, recording: Recording, position: int, room: int) -> ReplayedRound:
    """Return a round that the rule steers."""
    limit = min(controller.limit(), room)
    num_drafted = num_passes = num_accepted = 0
    decision = Decision.CONTINUE
    while num_drafted < limit and decision is Decision.CONTINUE:
        seen = recording.seen[position + num_drafted]
        decision = controller.decide(num_drafted, cast(DraftDistribution, seen))
        num_passes += 1
        num_drafted += decision is not Decision.STOP
    while num_accepted < num_drafted and recording.matches[position + num_accepted]:
        num_accepted += 1
    controller.observe(num_drafted, num_accepted)
    return ReplayedRound(num_drafted, num_passes, num_accepted)


def _checked_round(
    controller: Controller, recording: Recording, text: int, position: int, room: int, checked: LookupReplay
) -> ReplayedRound:
    """Return a round in which the draft checks copies; after its first wrong token it is taken to find none."""
    limit = min(controller.limit(), room)
    num_drafted = num_passes = num_right = 0
    widening = 0.0
    while num_drafted < limit:
        is_right = num_right == num_drafted
        copy = checked.at(text, position + num_drafted, limit - num_drafted - 1) if is_right else None
        num_copied, num_true = (0, 0) if copy is None else (copy.num_tokens, copy.num_right)
        num_passes += 1
        widening += checked.verify.verify_cost(num_copied) / checked.verify.verify_cost(0) - 1
        num_kept = 0
        while is_right and recording.matches[position + num_drafted + num_kept]:
            num_kept += 1
            if num_kept > num_true:
                break
        num_right += num_kept
        # A pass ends with a token of the draft's own, right after all copied ones that were, or wrong.
        num_drafted += num_kept if num_kept > num_true else num_kept + 1
    controller.observe(num_drafted, num_right)
    return ReplayedRound(num_drafted, num_passes, num_right, widening=widening)


def _room(num_left: int, max_drafted: int | None) -> int:
    """Return the most tokens to draft with `num_left` tokens left: the last token is the target's."""
    return num_left - 1 if max_drafted is None else min(num_left - 1, max_drafted)


def _copied_rounds(controller: Controller, copies: Copies, max_drafted: int | None) -> Iterator[ReplayedRound]:
    position, end = 0, len(copies)
    while position < end:
        room = _room(end - position, max_drafted)
        copy = copies[position] if room else None
        if copy is None:
            yield ReplayedRound(0, 0, 0)
            position += 1
            continue
        num_drafted = controller.length_of_copy(min(room, copy.num_tokens))
        num_accepted = min(copy.num_right, num_drafted)
        controller.observe(num_drafted, num_accepted)
        yield ReplayedRound(num_drafted, 0, num_accepted, looked_up=True)
        position += num_accepted + 1
