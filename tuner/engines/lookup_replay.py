"""Speed-ups of an engine's lookups, predicted from plain texts and from what a few measured lookups cost (our formulation).

A lookup without a draft model copies what the text itself decides, so plain texts tell exactly which rounds it drafts and how many
tokens of each are accepted. Two prices are left: what a round with a draft costs beyond a pass of plain decoding, whatever its
length, and what each drafted token adds. Lookups that were measured in the engine give both, and so the speed-up of all others.
A few prompts decide between lookups better so than by their times: speeds differ by a few percent, and single times by more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import nnls

from decoding.drafts.copies import NgramIndex

if TYPE_CHECKING:
    from studies.measurement import Measurement

Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, and of its plain greedy continuation."""


@dataclass(frozen=True)
class LookupCounts:
    """What a lookup does on some texts."""

    decoded: int
    """Tokens after the first of each text."""
    rounds: int = 0
    """Rounds that draft."""
    drafted: int = 0
    accepted: int = 0

    @property
    def passes(self) -> int:
        """Passes of the target, rounds without a draft included."""
        return self.decoded - self.accepted


@dataclass(frozen=True)
class LookupPrices:
    """What drafting costs beyond the passes, in passes of plain decoding."""

    per_round: float
    per_token: float
    """Of each drafted token."""

    def speedup(self, counts: LookupCounts) -> float:
        """Return the predicted speed-up over plain decoding."""
        return counts.decoded / (counts.passes + self.per_round * counts.rounds + self.per_token * counts.drafted)


def replay_lookup(texts: Iterable[Text], *, ngram: int, most: int) -> LookupCounts:
    """Return what a lookup does that copies up to `most` tokens after the latest earlier match of the last `ngram` tokens.

    A copy ends with the known tokens, and leaves room for the target's own token.
    """
    decoded = rounds = drafted = accepted = 0
    for prompt, continuation in texts:
        whole = [*prompt, *continuation]
        known = whole[: len(prompt) + 1]
        index = NgramIndex(known, ngram)
        decoded += len(continuation) - 1
        while len(known) < len(whole):
            right, start = 0, index.find_last()
            room = len(whole) - len(known) - 1
            copy = [] if start is None else known[start : start + min(most, room)]
            if copy:
                while right < len(copy) and copy[right] == whole[len(known) + right]:
                    right += 1
                rounds, drafted, accepted = rounds + 1, drafted + len(copy), accepted + right
            known.extend(whole[len(known) : len(known) + right + 1])
    return LookupCounts(decoded, rounds, drafted, accepted)


def lookup_prices(measured: Iterable[Measurement]) -> LookupPrices | None:
    """Return the prices that explain measured lookups best, by non-negative least squares; None if no round drafted.

    Each sample says how long it took beyond its passes, in passes of the plain decoding beside it.
    """
    amounts, beyond = [], []
    for sample in (sample for each in measured for sample in each.samples):
        plain_pass = sample.plain_seconds / sample.plain_tokens
        amounts.append((sample.rounds, sample.drafted))
        beyond.append(sample.draft_seconds / plain_pass - (sample.draft_tokens - sample.accepted))
    if not any(rounds for rounds, _ in amounts):
        return None
    (per_round, per_token), _ = nnls(np.array(amounts, dtype=float), np.array(beyond))
    return LookupPrices(float(per_round), float(per_token))
