"""Replays a draft-length rule on a recording of a draft: what it would cost and gain, without the model.

Our formulation. A recording holds, for each position of a text that the target has written, whether the draft would have
drafted the target's token there, and how sure it was; both teacher forced, from one pass over the text. Greedy rounds then
go as they would in decoding, but for what a rule reads behind a rejected draft, where a real draft is on a path of its own,
and for drafts that reach past the end of a text that ends by itself.
A replay is a prediction: it may choose what to measure, and is never reported as a measurement.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from decoding.draft_length import Controller, CostAwareRule, Decision, DraftDistribution, DraftLengthRule, RoundCosts


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
        if temperature:
            draws = torch.rand(len(overlap), generator=torch.Generator().manual_seed(seed))
            matches = draws < overlap.cpu()
        else:
            matches = target.likeliest == draft.argmax(dim=-1)
        entropy = torch.special.entr(q).sum(dim=-1)
        seen = zip(q.amax(dim=-1).tolist(), entropy.tolist(), strict=True)
        return cls(tuple(matches.tolist()), tuple(_Seen(*pair) for pair in seen), float(overlap.mean()))


@dataclass(frozen=True)
class Replayed:
    """Tokens of a replay, and what they would cost in plain passes of the target."""

    tokens: int
    cost: float

    @property
    def speedup(self) -> float:
        """Predicted speed-up over plain decoding, whose tokens cost 1 each."""
        return self.tokens / self.cost


def replay(rule: DraftLengthRule, recordings: Iterable[Recording], costs: RoundCosts) -> Replayed:
    """Let `rule` steer over the recorded texts, each with a fresh controller unless it is persistent."""
    if isinstance(rule, CostAwareRule):
        rule = rule.with_costs(costs)
    kept = rule.controller() if rule.persistent else None
    tokens, cost = 0, 0.0
    for recording in recordings:
        cost += _replay_text(kept or rule.controller(), recording, costs)
        tokens += len(recording.matches)
    return Replayed(tokens, cost)


def _replay_text(controller: Controller, recording: Recording, costs: RoundCosts) -> float:
    place, end, cost = 0, len(recording.matches), 0.0
    while place < end:
        limit = min(controller.limit(), end - place - 1)  # the last token of a text is the target's
        num_drafted = num_passes = 0
        decision = Decision.CONTINUE
        while num_drafted < limit and decision is Decision.CONTINUE:
            decision = controller.decide(num_drafted, cast(DraftDistribution, recording.seen[place + num_drafted]))
            num_passes += 1
            num_drafted += decision is not Decision.STOP
        drafted = recording.matches[place : place + num_drafted]
        num_accepted = drafted.index(False) if False in drafted else num_drafted
        controller.observe(num_drafted, num_accepted)
        cost += costs.of(num_drafted) + (num_passes - num_drafted) * costs.draft_step
        place += num_accepted + 1
    return cost
