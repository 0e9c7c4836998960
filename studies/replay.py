"""Replays a draft-length rule on a recording of a draft: what it would cost and gain, without the model.

Our formulation. A recording holds, for each position of a text that the target has written, whether the draft would have
drafted the target's token there, and how sure it was; both teacher forced, from one pass over the text. Greedy rounds then
go as they would in decoding, but for what a rule reads behind a rejected draft, where a real draft is on a path of its own,
and for drafts that reach past the end of a text that ends by itself.
A replay is a prediction: it may choose what to measure, and is never reported as a measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from decoding.draft_length import Controller, CostAwareRule, Decision, DraftDistribution, DraftLengthRule, RoundCosts
from decoding.drafters.prompt_lookup import length_allowed


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
    """Tokens, rounds and draft passes of a replay, and what they would cost in plain passes of the target."""

    tokens: int
    rounds: int
    draft_passes: int
    cost: float
    costs_per_token: tuple[float, ...] = ()
    """Of each text."""

    @property
    def speedup(self) -> float:
        """Predicted speed-up over plain decoding, whose tokens cost 1 each."""
        return self.tokens / self.cost

    def speedup_on(self, texts: Sequence[int]) -> float:
        """The same for some of the texts, each weighing the same, as a measurement has it."""
        return len(texts) / sum(self.costs_per_token[text] for text in texts)


@dataclass(frozen=True)
class LookupReplay:
    """Prompt lookup in front of a draft: what it would copy on each text, how many tokens at a time, and what verifying n costs."""

    copies: Sequence[Copies]
    max_tokens: int
    verify: RoundCosts
    """Of passes through the whole target; its draft step is not counted."""


def replay(
    rule: DraftLengthRule, recordings: Sequence[Recording], costs: RoundCosts, lookup: LookupReplay | None = None
) -> Replayed:
    """Let `rule` steer over the recorded texts, each with a fresh controller unless it is persistent.

    Rounds that `lookup` drafts are none of the rule's.
    """
    if isinstance(rule, CostAwareRule):
        rule = rule.with_costs(costs)
    kept = rule.controller() if rule.persistent else None
    tokens = rounds = passes = 0
    costs_of_texts = []
    for index, recording in enumerate(recordings):
        cost = 0.0
        for step in _rounds(kept or rule.controller(), recording, lookup, index):
            rounds += 1
            passes += step.num_passes
            if step.looked_up and lookup is not None:
                cost += lookup.verify.verify_cost(step.num_drafted)
            else:
                cost += costs.of(step.num_drafted) + (step.num_passes - step.num_drafted) * costs.draft_step
        tokens += len(recording.matches)
        costs_of_texts.append(cost)
    per_token = [cost / len(each.matches) for cost, each in zip(costs_of_texts, recordings, strict=True)]
    return Replayed(tokens, rounds, passes, sum(costs_of_texts), tuple(per_token))


def replay_copies(rule: DraftLengthRule, copies: Sequence[Copies], costs: RoundCosts) -> Replayed:
    """Prompt lookup alone, with `rule` deciding how many tokens are copied; `costs` are those of the whole target's passes."""
    if isinstance(rule, CostAwareRule):
        rule = rule.with_costs(costs)
    kept = rule.controller() if rule.persistent else None
    tokens = rounds = 0
    costs_of_texts = []
    for text in copies:
        cost = 0.0
        for num_drafted in _copied_rounds(kept or rule.controller(), text):
            rounds += 1
            cost += costs.of(num_drafted)
        tokens += len(text)
        costs_of_texts.append(cost)
    per_token = [cost / len(text) for cost, text in zip(costs_of_texts, copies, strict=True)]
    return Replayed(tokens, rounds, 0, sum(costs_of_texts), tuple(per_token))


class _Step(NamedTuple):
    """One round: tokens drafted, and draft passes run, one more if the last was not drawn from."""

    num_drafted: int
    num_passes: int
    looked_up: bool = False


def _rounds(controller: Controller, recording: Recording, lookup: LookupReplay | None, text: int) -> Iterator[_Step]:
    place, end = 0, len(recording.matches)
    while place < end:
        room = end - place - 1  # the last token of a text is the target's
        if lookup is not None and room and (num_right := lookup.copies[text][place]) is not None:
            num_copied = min(lookup.max_tokens, room)
            yield _Step(num_copied, 0, looked_up=True)
            place += min(num_right, num_copied) + 1
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
        yield _Step(num_drafted, num_passes)
        place += num_accepted + 1


def _copied_rounds(controller: Controller, copies: Copies) -> Iterator[int]:
    """Tokens drafted in each round of one text."""
    place, end = 0, len(copies)
    while place < end:
        room = end - place - 1
        num_right = copies[place] if room else None
        if num_right is None:
            yield 0
            place += 1
            continue
        num_drafted = length_allowed(controller, room)
        num_accepted = min(num_right, num_drafted)
        controller.observe(num_drafted, num_accepted)
        yield num_drafted
        place += num_accepted + 1
