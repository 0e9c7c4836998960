"""Choice of the stage that opens a round, by what has paid in this sequence (our formulation).

A stage has paid (tokens of its rounds) / (cost of its rounds), both faded, in tokens per plain pass. The first stage opens the
round unless a later one has paid `margin` times as much; if the rate of that stage is below 1, the round is a plain step.

A copy is judged in every round, whether it opened the round or not: the tokens that were written in its stead show how much of it
was right. So a copy that is passed over need not be tried to find out that copies pay again. A stage without evidence has the rate
`start`, as if one round had shown it; a stage that could have opened and was not judged forgets slowly, and is tried again.

Nothing is random, and nothing but verified tokens decides: greedy decoding repeats itself, and sampling stays exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from decoding.draft_length.contract import IDLE_AGEING
from decoding.drafts.choice import StageChoice


class JudgedCopy(NamedTuple):
    """A copy that was found at the beginning of a round, opened or not."""

    num_tokens: int
    num_right: int
    """Number of leading tokens that agree with the tokens of the round."""


@dataclass(slots=True)
class _Paid:
    """Tokens and cost of a stage's rounds beyond the start, faded."""

    tokens: float = 0.0
    cost: float = 0.0

    def fade(self, share: float) -> None:
        """Keep this share of the evidence."""
        self.tokens *= share
        self.cost *= share

    def learn(self, tokens: float, cost: float, share: float) -> None:
        """Count a round, after fading."""
        self.fade(share)
        self.tokens += tokens
        self.cost += cost


class Chooser:
    """What each stage has paid in one sequence; decoding and replay call it alike.

    In each round `choose` is called first, then `drafted`, and `learn` when its tokens are known.
    """

    def __init__(self, choice: StageChoice) -> None:
        self._choice = choice
        self._paid = [_Paid() for _ in choice.prices]
        self._able: Sequence[int] = ()
        self._opened: int | None = None
        self._cost = 1.0

    def choose(self, able: Sequence[int]) -> int | None:
        """Return the stage, among those `able` to draft in ascending order, that opens the round; None for a plain step."""
        self._able, self._opened = able, None
        if able:
            best = able[0]
            for stage in able[1:]:
                best = stage if self.rate(stage) > self._choice.margin * self.rate(best) else best
            self._opened = best if self.rate(best) >= 1.0 else None
        return self._opened

    def drafted(self, num_tokens: int) -> None:
        """Note the number of tokens that the opening stage has drafted."""
        self._cost = 1.0 if self._opened is None else self._cost_of(self._opened, num_tokens)

    def learn(self, num_tokens: int, copies: Mapping[int, JudgedCopy]) -> None:
        """Learn from the round's number of tokens, and from the copies of stages, by stage.

        If a copy agrees with all tokens of the round, the rest of it counts as right.
        """
        keep = self._choice.forgetting
        for stage, copy in copies.items():
            num_right = copy.num_tokens if copy.num_right >= num_tokens else copy.num_right
            self._paid[stage].learn(num_right + 1, self._cost_of(stage, copy.num_tokens), keep)
        for stage in self._able:
            if stage == self._opened and stage not in copies:
                self._paid[stage].learn(num_tokens, self._cost, keep)
            elif stage not in copies:
                self._paid[stage].fade(keep**IDLE_AGEING)

    def rate(self, stage: int) -> float:
        """Return what a stage has paid, in tokens per plain pass."""
        paid = self._paid[stage]
        return (self._choice.start + paid.tokens) / (1.0 + paid.cost)

    def _cost_of(self, stage: int, num_tokens: int) -> float:
        return 1.0 + num_tokens * self._choice.prices[stage]


@dataclass
class ChosenRounds:
    """The chooser of a sequence that is being written, and the copies of its current round."""

    chooser: Chooser
    begin: int = 0
    copies: dict[int, Sequence[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, choice: StageChoice) -> ChosenRounds:
        """Return the rounds of a new sequence."""
        return cls(Chooser(choice))

    def open(self, token_ids: Sequence[int], copies: dict[int, Sequence[int]], able: Sequence[int]) -> int | None:
        """Learn from the round before, and return the stage that opens the next one; None for a plain step.

        `token_ids` is the sequence so far, and `copies` what was found to copy after it, by stage.
        """
        written = token_ids[self.begin :] if self.begin else ()
        if written:
            self.chooser.learn(len(written), {stage: _judge(copy, written) for stage, copy in self.copies.items()})
        self.begin, self.copies = len(token_ids), copies
        return self.chooser.choose(able)


def _judge(copy: Sequence[int], written: Sequence[int]) -> JudgedCopy:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(copy, written, strict=False))
    return JudgedCopy(len(copy), sum(1 for _ in same))
