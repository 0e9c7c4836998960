"""Records of a decoding run, one per round, and the rates derived from them.

Nothing here decides, measures or touches a tensor. The loops in `decoding.decode` write the records; everything else
reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefill:
    """The full model's pass over the prompt, and the first generated token."""

    token: int
    seconds: float
    """Seconds of reading the prompt, or, of a prompt that was known, of recalling it and of the reading before."""


@dataclass(frozen=True, slots=True)
class Round:
    """One draft-and-verify round; a round of plain decoding drafts nothing.

    `tokens` are the tokens that the round appended: the accepted drafts and one token of the target, truncated where
    the sequence ended. `num_accepted` counts every draft the target agreed with, including drafts after the end of
    the sequence.
    """

    tokens: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    seconds: float
    draft_seconds: float
    """Seconds spent drafting; on a GPU those of the launch if nothing waited for the draft."""
    looked_up: bool = False
    """True if the drafts were copied from the sequence (prompt lookup) and not computed."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The decoding of one prompt: its prefill and its rounds. Rates cover the decode phase only."""

    prefill: Prefill
    rounds: tuple[Round, ...]

    @classmethod
    def collect(cls, steps: Iterable[Prefill | Round]) -> Generation:
        first, *rounds = steps
        assert isinstance(first, Prefill), "a loop yields its prefill first"
        return cls(prefill=first, rounds=tuple(step for step in rounds if isinstance(step, Round)))

    @property
    def tokens(self) -> tuple[int, ...]:
        """All generated tokens, including the prefill's."""
        return (self.prefill.token, *(token for step in self.rounds for token in step.tokens))

    @property
    def num_decoded(self) -> int:
        """Number of tokens of the decode phase, without the prefill's."""
        return sum(len(step.tokens) for step in self.rounds)

    @property
    def num_drafted(self) -> int:
        return sum(step.num_drafted for step in self.rounds)

    @property
    def num_looked_up(self) -> int:
        """Number of drafted tokens that were copied from the sequence."""
        return sum(step.num_drafted for step in self.rounds if step.looked_up)

    @property
    def num_accepted(self) -> int:
        """Number of drafted tokens that the target agreed with."""
        return sum(step.num_accepted for step in self.rounds)

    @property
    def decode_seconds(self) -> float:
        return sum(step.seconds for step in self.rounds)

    @property
    def draft_seconds(self) -> float:
        return sum(step.draft_seconds for step in self.rounds)

    @property
    def accepted_lengths(self) -> Counter[int]:
        return Counter(step.num_accepted for step in self.rounds)


@dataclass(frozen=True, slots=True)
class BatchGeneration:
    """The lockstep decoding of several prompts.

    The seconds here are wall-clock seconds of the whole batch. The seconds in `generations` are each sequence's
    waiting time.
    """

    generations: tuple[Generation, ...]
    prefill_seconds: float
    """Seconds until the last prompt was read."""
    decode_seconds: float
    """Seconds from the last prefill to the end of the last sequence."""

    @property
    def num_decoded(self) -> int:
        """Number of tokens of the decode phase, over all sequences."""
        return sum(generation.num_decoded for generation in self.generations)
