"""Fallback to plain rounds: rounds draft where that gives more tokens per second, at the present load (our formulation).

A profile's speed-up holds for the text and the batch size that it was tuned for. Here both arms, rounds with drafts and plain
rounds, are measured where they run: the arm in use all the time, the other in short trials. A plain round is a round of a drafted
sequence that drafts nothing. So a sequence may change arms at any round, and its text stays what it is.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.cache.kv_cache import KVCache
from decoding.decoder import Decoder
from decoding.draft_length import Controller
from decoding.drafters.contract import Drafter, Proposal, prefill_target
from decoding.runners.contract import Outputs
from decoding.text import Shaping, TokenSequence

ROUNDS_PER_WINDOW = 8
"""Rounds per sequence after which a window ends and the arms are compared."""
FORGETTING = 0.6
"""Share of an arm's evidence that each of its windows keeps."""
HYSTERESIS = 1.02
"""How many times faster the other arm must be to be taken."""
TRIAL_LOSS = 0.01
"""Share of the time that trials of the slower arm may cost."""
SHORTEST_PERIOD, LONGEST_PERIOD = 8, 64
"""Windows from one trial to the next."""


@dataclass
class ArmEvidence:
    """What one arm has done at one load; old windows count less."""

    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Tokens per second, or None before the first window."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    def add(self, tokens: float, seconds: float) -> None:
        """Add a window."""
        self.tokens = FORGETTING * self.tokens + tokens
        self.seconds = FORGETTING * self.seconds + seconds


@dataclass
class LoadEvidence:
    """Both arms at one load: sequences side by side, up to a power of two."""

    arms: dict[bool, ArmEvidence] = field(default_factory=lambda: {True: ArmEvidence(), False: ArmEvidence()})
    drafts: bool = True
    """True if drafting is the arm in use, False if plain rounds are."""
    windows_since_trial: int = 0

    def choose(self) -> bool:
        """Return the arm of the next window: the one in use, or a trial of the other."""
        used, other = self.arms[self.drafts].rate, self.arms[not self.drafts].rate
        if used is None:
            return self.drafts
        if other is None:
            return self._trial()
        if other > HYSTERESIS * used:
            self.drafts, self.windows_since_trial = not self.drafts, 0
            return self.drafts
        self.windows_since_trial += 1
        loss = max(1.0 - other / used, 0.0)
        period = min(max(math.ceil(loss / TRIAL_LOSS), SHORTEST_PERIOD), LONGEST_PERIOD)
        return self._trial() if self.windows_since_trial >= period else self.drafts

    def _trial(self) -> bool:
        self.windows_since_trial = 0
        return not self.drafts


class DraftingSwitch:
    """Says before each round whether it may draft. Used by one thread.

    `tuned_batch` is the number of sequences side by side that the drafts were tuned for. Where there are more, rounds are plain
    until drafts have been faster in a trial: a draft that pays for one sequence seldom pays for many.
    """

    def __init__(self, tuned_batch: int = 1) -> None:
        self.may_draft = True
        self._tuned_load = tuned_batch.bit_length()
        self._loads: dict[int, LoadEvidence] = {}
        self._load = 0
        self._begin()

    def observe(self, num_running: int, num_rounds: int, num_tokens: int, seconds: float) -> None:
        """Take in `seconds` of decoding `num_running` sequences, in which rounds ended and appended tokens.

        Seconds in which prompts were read must be left out.
        """
        load = num_running.bit_length()
        if load != self._load:
            self._load = load
            self.may_draft = self._evidence.choose()
            self._begin()
            return
        # A round that began in the last window belongs to its arm.
        if self._num_skipped < num_running:
            self._num_skipped += num_rounds
            return
        self._num_rounds += num_rounds
        self._tokens += num_tokens
        self._seconds += seconds
        if self._num_rounds >= ROUNDS_PER_WINDOW * num_running and self._seconds > 0:
            self._evidence.arms[self.may_draft].add(self._tokens, self._seconds)
            before, self.may_draft = self.may_draft, self._evidence.choose()
            self._begin(skip=before is not self.may_draft)

    @property
    def _evidence(self) -> LoadEvidence:
        return self._loads.setdefault(self._load, LoadEvidence(drafts=self._load <= self._tuned_load))

    def _begin(self, *, skip: bool = True) -> None:
        self._num_rounds = self._tokens = 0
        self._num_skipped = 0 if skip else 2**31
        self._seconds = 0.0


class SwitchedDrafter:
    """A drafter that drafts nothing while its switch says so."""

    def __init__(self, drafter: Drafter, switch: DraftingSwitch) -> None:
        self._drafter, self._switch = drafter, switch

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        """See `Drafter.prefill`."""
        if self._switch.may_draft:
            return self._drafter.prefill(sequence, cache)
        return prefill_target(self._drafter, sequence, cache)

    def draft(
        self,
        sequence: TokenSequence,
        cache: KVCache,
        controller: Controller,
        shaping: Shaping,
        acceptance: Acceptance,
        limit: int,
    ) -> Proposal:
        """Propose nothing in a plain round; see `Drafter.draft`."""
        if self._switch.may_draft:
            return self._drafter.draft(sequence, cache, controller, shaping, acceptance, limit)
        return Proposal(0, None, steered=False)

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        """See `Drafter.verify`."""
        return self._drafter.verify(sequence, cache, draft)


def switched(decoder: Decoder, switch: DraftingSwitch) -> Decoder:
    """Return the decoder with rounds that draft only while `switch` lets them; a plain decoder as it is."""
    if decoder.drafter is None:
        return decoder
    other = copy.copy(decoder)
    other.drafter = SwitchedDrafter(decoder.drafter, switch)
    return other
