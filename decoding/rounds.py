"""Facts of a decoding run, one record a round, and the rates derived from them.

Nothing here decides, measures or touches a tensor: the loops in `decoding.decode` write these records, everybody else reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefill:
    """The full model's pass over the prompt, and the token it gave."""

    token: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Round:
    """One draft-and-verify round; plain decoding is a round that drafts nothing.

    `tokens` is what the round added to the text: the accepted drafts and one token of the target, cut where the text ended.
    `num_accepted` counts the drafts the target agreed with, also those behind the end of the text.
    """

    tokens: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    seconds: float
    draft_seconds: float
    looked_up: bool = False
    """Whether the drafts were copied from the text (prompt lookup), not computed."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One prompt's decoding: its prefill and its rounds. Rates are over the decode phase alone."""

    prefill: Prefill
    rounds: tuple[Round, ...]

    @classmethod
    def collect(cls, steps: Iterable[Prefill | Round]) -> Generation:
        """Drain a loop of `decoding.decode`."""
        first, *rounds = steps
        assert isinstance(first, Prefill), "a loop yields its prefill first"
        return cls(prefill=first, rounds=tuple(step for step in rounds if isinstance(step, Round)))

    @property
    def tokens(self) -> tuple[int, ...]:
        """All generated tokens, the prefill's among them."""
        return (self.prefill.token, *(token for step in self.rounds for token in step.tokens))

    @property
    def num_decoded(self) -> int:
        """Tokens produced by the decode phase, that is without the prefill's."""
        return sum(len(step.tokens) for step in self.rounds)

    @property
    def num_drafted(self) -> int:
        """Tokens proposed by the draft."""
        return sum(step.num_drafted for step in self.rounds)

    @property
    def num_looked_up(self) -> int:
        """The part of `num_drafted` that was copied from the text."""
        return sum(step.num_drafted for step in self.rounds if step.looked_up)

    @property
    def num_accepted(self) -> int:
        """Proposed tokens that the target agreed with."""
        return sum(step.num_accepted for step in self.rounds)

    @property
    def decode_seconds(self) -> float:
        """Wall-clock seconds of the decode phase."""
        return sum(step.seconds for step in self.rounds)

    @property
    def draft_seconds(self) -> float:
        """The part of `decode_seconds` spent proposing."""
        return sum(step.draft_seconds for step in self.rounds)

    @property
    def accepted_lengths(self) -> Counter[int]:
        """How many rounds accepted 0, 1, 2 ... drafts."""
        return Counter(step.num_accepted for step in self.rounds)


@dataclass(frozen=True, slots=True)
class BatchGeneration:
    """The decoding of several prompts in step. Here seconds are those of all; in `generations`, what each text has waited."""

    generations: tuple[Generation, ...]
    prefill_seconds: float
    """Until the last prompt was read."""
    decode_seconds: float
    """From there to the end of the last text."""

    @classmethod
    def of_one(cls, generation: Generation) -> BatchGeneration:
        """A text that was decoded alone: its own seconds are those of all."""
        return cls((generation,), generation.prefill.seconds, generation.decode_seconds)

    @property
    def num_decoded(self) -> int:
        """Tokens produced by the decode phase in all texts."""
        return sum(generation.num_decoded for generation in self.generations)
