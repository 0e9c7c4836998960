"""Replays a draft-length rule on a recording of a draft: what it would cost and gain, without the model.

Our formulation. A recording holds, for each position of a text that the target has written, whether the draft would have
drafted the target's token there, and how sure it was; both teacher forced, from one pass over the text. Greedy rounds then
go as they would in decoding, but for what a rule reads behind a rejected draft, where a real draft is on a path of its own,
and for drafts that reach past the end of a text that ends by itself. Texts in step are replayed in step
(`studies.prediction.lockstep_cost`).
A replay is a prediction: it may choose what to measure, and is never reported as a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from decoding.draft_length import Controller, CostAwareRule, Decision, DraftDistribution, DraftLengthRule, RoundCosts
from decoding.drafters.prompt_lookup import length_allowed
from studies.prediction.lockstep_cost import LockstepBatches, ReplayedRound, cost_in_lockstep, cost_unbatched


@dataclass(frozen=True)
class _Seen:
    """What a rule may ask of a `DraftDistribution`, from the record."""

    top_probability: float
    entropy: float


@dataclass(frozen=True)
class TargetText:
    """What the target says at each position of a text, kept to be compared with many drafts."""

    probabilities: Tensor
    """[positions, vocabulary], at the temperature of the search, or at 1 if it is greedy."""
    likeliest: Tensor
    """[positions]"""

    @classmethod
    def of(cls, logits: Tensor, *, temperature: float = 0.0) -> TargetText:
        """From the target's logits [positions, vocabulary]. Raises ValueError if there are no positions."""
        if not len(logits):
            raise ValueError("a recording needs a text of at least one token behind the prefill's")
        return cls(torch.softmax(logits.float() / (temperature or 1.0), dim=-1), logits.argmax(dim=-1))

    @property
    def num_positions(self) -> int:
        """Tokens that a draft would have to foretell."""
        return len(self.likeliest)


@dataclass(frozen=True)
class Recording:
    """One text as a draft saw it, from the token behind the prefill's on; one entry for each position."""

    matches: tuple[bool, ...]
    """Whether the draft would have been accepted there."""
    seen: tuple[_Seen, ...]
    acceptance: float
    """Mean over the positions of sum over v of min(p, q)."""

    @property
    def agreement(self) -> float:
        """Share of the positions at which the draft would have been accepted."""
        return sum(self.matches) / len(self.matches)

    @classmethod
    def of(cls, target: Tensor, draft: Tensor, *, temperature: float = 0.0, seed: int = 0) -> Recording:
        """From the logits [positions, vocabulary] of the target and of the draft at the same positions of a text; see `against`."""
        return cls.against(TargetText.of(target, temperature=temperature), draft, temperature=temperature, seed=seed)

    @classmethod
    def against(cls, target: TargetText, draft: Tensor, *, temperature: float = 0.0, seed: int = 0) -> Recording:
        """A draft by its logits [positions, vocabulary] on a text of the target, at the same temperature.

        Greedy drafts match where both have the same likeliest token; at a temperature, with probability sum over v of min(p, q),
        drawn once with `seed`: two drafts with the same seed meet the same luck.
        """
        q = torch.softmax(draft.float() / (temperature or 1.0), dim=-1)
        overlap = torch.minimum(target.probabilities, q).sum(dim=-1)
        greedy = target.likeliest == draft.argmax(dim=-1)
        matches = draws(len(overlap), seed) < overlap.cpu() if temperature else greedy
        entropy = torch.special.entr(q).sum(dim=-1)
        seen = zip(q.amax(dim=-1).tolist(), entropy.tolist(), strict=True)
        return cls(tuple(matches.tolist()), tuple(_Seen(*pair) for pair in seen), float(overlap.mean()))


def draws(count: int, seed: int) -> Tensor:
    """The luck of each position of a text, [count] in [0, 1): the same for all drafts that are compared on it."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


Copies = Sequence[int | None]
"""What prompt lookup would do in a round that begins at each position of a text: how many of the tokens it copies are right, as
far as it was looked, or None where there is nothing to copy."""


@dataclass(frozen=True)
class Replayed:
    """Tokens, rounds and draft passes of a replay, and what they would cost in plain passes of the target.

    A plain pass of texts in step writes a token of each; here a token counts as much of it as plain decoding spends on one.
    """

    tokens: int
    rounds: int
    draft_passes: int
    cost: float
    costs_per_token: tuple[float, ...] = ()
    """Of each text, or of each batch of texts in step."""

    @property
    def speedup(self) -> float:
        """Predicted speed-up over plain decoding, whose tokens cost 1 each."""
        return self.tokens / self.cost

    def speedup_on(self, texts: Sequence[int]) -> float:
        """The same for some of the texts (or batches), each weighing the same, as a measurement has it."""
        return len(texts) / sum(self.costs_per_token[text] for text in texts)


def replay_plain(num_tokens: int, num_parts: int) -> Replayed:
    """Return the replay of plain decoding on `num_parts` sequences or batches: each token costs one plain pass."""
    return Replayed(num_tokens, num_tokens, 0, float(num_tokens), (1.0,) * num_parts)


@dataclass(frozen=True)
class LookupReplay:
    """Prompt lookup in front of a draft: what it would copy on each text, how many tokens at a time, and what verifying n costs."""

    copies: Sequence[Copies]
    max_tokens: int
    verify: RoundCosts
    """Of passes through the whole target; its draft step is not counted."""


def replay(
    rule: DraftLengthRule,
    recordings: Sequence[Recording],
    costs: RoundCosts,
    lookup: LookupReplay | None = None,
    together: LockstepBatches | None = None,
    *,
    max_drafted: int | None = None,
) -> Replayed:
    """Let `rule` steer over the recorded texts, each with a fresh controller unless it is persistent.

    Rounds that `lookup` drafts are none of the rule's. With `together` its batches are written in step, and `costs` are those of
    passes over as many texts; without it each text is by itself. `max_drafted` is how many tokens a verification has room for,
    if that is bounded.
    """

    def rounds(controller: Controller, text: int) -> Iterator[ReplayedRound]:
        return _rounds(controller, recordings[text], lookup, text, max_drafted)

    lengths = [len(recording.matches) for recording in recordings]
    return _replay(rule, lengths, rounds, costs, lookup.verify if lookup else None, together)


def replay_copies(
    rule: DraftLengthRule,
    copies: Sequence[Copies],
    costs: RoundCosts,
    together: LockstepBatches | None = None,
    *,
    max_drafted: int | None = None,
) -> Replayed:
    """Prompt lookup alone, with `rule` deciding how many tokens are copied; `costs` are those of the whole target's passes. For
    the others see `replay`.
    """

    def rounds(controller: Controller, text: int) -> Iterator[ReplayedRound]:
        return _copied_rounds(controller, copies[text], max_drafted)

    return _replay(rule, [len(text) for text in copies], rounds, costs, None, together)


def _replay(
    rule: DraftLengthRule,
    lengths: Sequence[int],
    rounds_of: Callable[[Controller, int], Iterator[ReplayedRound]],
    costs: RoundCosts,
    copied: RoundCosts | None,
    together: LockstepBatches | None,
) -> Replayed:
    """Texts of these lengths, whose rounds `rounds_of` gives; for `copied` see `cost_unbatched`."""
    if isinstance(rule, CostAwareRule):
        rule = rule.with_costs(costs)
    together = together or LockstepBatches(tuple((text,) for text in range(len(lengths))))
    controllers: dict[int, Controller] = {}
    counted = _Counted()
    total, per_token = 0.0, []
    for batch in together.batches:
        texts = []
        for row, text in enumerate(batch):
            if not rule.persistent or row not in controllers:
                controllers[row] = rule.controller()
            texts.append(counted.watch(rounds_of(controllers[row], text)))
        paid = costs.looking() if controllers[0].looks_at_drafts else costs
        if len(texts) == 1:
            cost = sum(cost_unbatched(step, paid, copied) for step in texts[0])
        else:
            cost = cost_in_lockstep(together.asked(steps, paid, copied) for steps in texts)
        # Plainly, a batch takes as many passes as its longest text has tokens.
        num_plain = max(lengths[text] for text in batch)
        total += cost * (sum(lengths[text] for text in batch) / num_plain)
        per_token.append(cost / num_plain)
    return Replayed(sum(lengths), counted.rounds, counted.passes, total, tuple(per_token))


class _Counted:
    """Counts rounds and draft passes as they go by."""

    def __init__(self) -> None:
        self.rounds = self.passes = 0

    def watch(self, steps: Iterable[ReplayedRound]) -> Iterator[ReplayedRound]:
        for step in steps:
            self.rounds += 1
            self.passes += step.num_passes
            yield step


def _rounds(
    controller: Controller, recording: Recording, lookup: LookupReplay | None, text: int, max_drafted: int | None
) -> Iterator[ReplayedRound]:
    place, end = 0, len(recording.matches)
    while place < end:
        room = _room(end - place, max_drafted)
        if lookup is not None and room and (num_right := lookup.copies[text][place]) is not None:
            num_copied = min(lookup.max_tokens, room)
            yield ReplayedRound(num_copied, 0, num_accepted := min(num_right, num_copied), looked_up=True)
            place += num_accepted + 1
            continue
        limit = min(controller.limit(), room)
        num_drafted = num_passes = 0
        decision = Decision.CONTINUE
        while num_drafted < limit and decision is Decision.CONTINUE:
            decision = controller.decide(num_drafted, cast(DraftDistribution, recording.seen[place + num_drafted]))
            num_passes += 1
            num_drafted += decision is not Decision.STOP
        drafted = recording.matches[place : place + num_drafted]
        num_accepted = drafted.index(False) if False in drafted else num_drafted
        controller.observe(num_drafted, num_accepted)
        yield ReplayedRound(num_drafted, num_passes, num_accepted)
        place += num_accepted + 1


def _room(num_left: int, max_drafted: int | None) -> int:
    """How many tokens may be drafted of a text that wants so many more: its last token is the target's."""
    return num_left - 1 if max_drafted is None else min(num_left - 1, max_drafted)


def _copied_rounds(controller: Controller, copies: Copies, max_drafted: int | None) -> Iterator[ReplayedRound]:
    place, end = 0, len(copies)
    while place < end:
        room = _room(end - place, max_drafted)
        num_right = copies[place] if room else None
        if num_right is None:
            yield ReplayedRound(0, 0, 0)
            place += 1
            continue
        num_drafted = length_allowed(controller, room)
        num_accepted = min(num_right, num_drafted)
        controller.observe(num_drafted, num_accepted)
        yield ReplayedRound(num_drafted, 0, num_accepted, looked_up=True)
        place += num_accepted + 1
