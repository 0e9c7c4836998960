"""Random configurations of every kind, for evaluating predictions and intervals.

Our choice. A search measures mostly good drafts, so its trials cannot show whether bad drafts are recognised. Here sizes and
settings are drawn uniformly from the whole range, and each kind of draft has its share of the draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from decoding.drafts import Draft, EarlyExit, LayerSkip, Lookup, PromptLookup
from studies.contract import Candidate
from studies.prediction.skip_space import SkipSpace
from studies.rule_space import draw_rule

LEAST_SHARE, MOST_SHARE = 0.05, 0.65
"""Range of the share of sublayers that a skip set skips."""
MOST_NGRAM = 5
COPIED = (2, 8)
"""Fewest and most tokens that a lookup before a draft copies."""
TRIES = 50
"""Number of draws in search of a new configuration, before giving up."""
LATE = 0.5
"""Share of the contiguous skip sets that end with the last block but one, where models are often most redundant."""

SKIP_SET, EXIT, EXIT_WITH_HEAD = "skip set", "exit", "exit with head"
LOOKUP_FIRST, LOOKUP_ALONE = "lookup first", "lookup alone"

SHARES = {SKIP_SET: 0.4, EXIT: 0.2, EXIT_WITH_HEAD: 0.2, LOOKUP_FIRST: 0.1, LOOKUP_ALONE: 0.1}
"""Share of each kind; without exit heads, the other kinds divide their share."""


def kind_of(draft: Draft) -> str:
    """Return the group of a draft, a key of `SHARES` for the kinds drawn here. Raises ValueError for plain decoding."""
    if not draft.drafts:
        raise ValueError("plain decoding is not a draft")
    return LOOKUP_FIRST if draft.lookup_first else draft.label


@dataclass(frozen=True)
class RandomCandidates:
    """Draws configurations of a model; `head_drafts` are the exits that have a head, by exit layer.

    Raises ValueError for a model with fewer than two layers, in which nothing can be skipped, and without a rule.
    """

    space: SkipSpace
    num_layers: int
    head_drafts: Mapping[int, EarlyExit]
    rules: Sequence[str]
    max_tokens: int
    """Longest draft to draw (K)."""

    def __post_init__(self) -> None:
        if self.num_layers < 2 or not self.rules:
            raise ValueError(f"needs 2 layers and a rule at least, got {self.num_layers} and {list(self.rules)}")

    def draw(self, count: int, seed: int) -> list[Candidate]:
        """Return `count` different configurations in random order, or as many as exist.

        Kinds have their shares; rules alternate.
        """
        stream = np.random.default_rng(seed)
        drawn: dict[str, Candidate] = {}
        for kind, wanted in self._counts(count).items():
            first = int(stream.integers(len(self.rules)))
            for number in range(wanted):
                rule = self.rules[(first + number) % len(self.rules)]
                for candidate in (self._draw(kind, rule, stream) for _ in range(TRIES)):
                    if candidate.key not in drawn:
                        drawn[candidate.key] = candidate
                        break
        return [list(drawn.values())[index] for index in stream.permutation(len(drawn))]

    def _draw(self, kind: str, rule: str, stream: np.random.Generator) -> Candidate:
        return Candidate(draft=self._drawers[kind](stream), draft_length=draw_rule(rule, self.max_tokens, stream))

    def _counts(self, count: int) -> dict[str, int]:
        """Return the number of each kind: the shares of `count`, rounded so that they add up."""
        shares = {kind: share for kind, share in SHARES.items() if kind != EXIT_WITH_HEAD or self.head_drafts}
        exact = {kind: count * share / sum(shares.values()) for kind, share in shares.items()}
        counts = {kind: int(number) for kind, number in exact.items()}
        for kind in sorted(exact, key=lambda kind: counts[kind] - exact[kind])[: count - sum(counts.values())]:
            counts[kind] += 1
        return counts

    @property
    def _drawers(self) -> dict[str, Callable[[np.random.Generator], Draft]]:
        return {
            SKIP_SET: self.skip_set,
            EXIT: self.exit,
            EXIT_WITH_HEAD: self.exit_with_head,
            LOOKUP_FIRST: self.lookup_first,
            LOOKUP_ALONE: lambda stream: PromptLookup(**_ngrams(stream)),
        }

    def skip_set(self, stream: np.random.Generator) -> LayerSkip:
        """Draw scattered sublayers or contiguous blocks, each half of the time."""
        share = stream.uniform(LEAST_SHARE, MOST_SHARE)
        if stream.random() < 0.5:
            return self._contiguous_blocks(share, stream)
        size = max(round(share * len(self.space.items)), 1)
        return self.space.draft(stream.choice(len(self.space.items), size, replace=False).tolist())

    def _contiguous_blocks(self, share: float, stream: np.random.Generator) -> LayerSkip:
        length = min(max(round(share * self.num_layers), 1), self.num_layers - 1)
        latest = self.num_layers - 1 - length  # the last block stays
        first = latest if stream.random() < LATE else int(stream.integers(latest + 1))
        return LayerSkip.blocks(tuple(range(first, first + length)))

    def exit(self, stream: np.random.Generator) -> EarlyExit:
        """Draw an exit without a head."""
        return EarlyExit(exit_layer=int(stream.integers(1, self.num_layers)))

    def exit_with_head(self, stream: np.random.Generator) -> EarlyExit:
        """Draw an exit that has a head."""
        return self.head_drafts[int(stream.choice(sorted(self.head_drafts)))]

    def lookup_first(self, stream: np.random.Generator) -> Draft:
        """Draw a lookup before a draft of another kind."""
        others: list[Callable[[np.random.Generator], LayerSkip | EarlyExit]] = [self.skip_set, self.exit]
        others += [self.exit_with_head] if self.head_drafts else []
        draft = others[int(stream.integers(len(others)))](stream)
        lookup = Lookup(**_ngrams(stream), max_tokens=int(stream.integers(COPIED[0], COPIED[1] + 1)))
        return draft.with_lookup(lookup)


def _ngrams(stream: np.random.Generator) -> dict[str, int]:
    most = int(stream.integers(1, MOST_NGRAM + 1))
    return {"max_ngram": most, "min_ngram": int(stream.integers(1, most + 1))}
