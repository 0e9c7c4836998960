"""Random configurations of every kind, for evaluating predictions and intervals.

Our choice. A search measures mostly good drafts, so its trials cannot show whether bad drafts are recognised. Here sizes and
settings are drawn uniformly from the whole range, and each kind of draft has its share of the draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from decoding.drafts import (
    BitWidth,
    Draft,
    EarlyExit,
    FeatureHeadDraft,
    FirstLookup,
    FixedLeaves,
    LayerSkip,
    Lookup,
    PromptLookup,
    SizedLeaves,
    SuffixDraft,
    SuffixLookup,
)
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
MOST_SHARE_QUANTISED = 0.2
"""Most of the sublayers that a quantised draft skips: rounding adds to the harm of a skip."""
LATE = 0.5
"""Share of the contiguous skip sets that end with the last block but one, where models are often most redundant."""

MOST_LEAVES = 4
"""Most side leaves at each depth; trees that are sized by their gain have up to twice as many in all."""
GAINS = (0.01, 0.3)
"""Least and highest expected gain of a leaf, in trees that are sized by it."""

SKIP_SET, EXIT, EXIT_WITH_HEAD = "skip set", "exit", "exit with head"
LOOKUP_FIRST, LOOKUP_ALONE, QUANTISED = "lookup first", "lookup alone", "quantised"

FEATURE_HEAD, LEAVES = "feature head", "leaves"

SHARES = {
    SKIP_SET: 0.4,
    EXIT: 0.2,
    EXIT_WITH_HEAD: 0.2,
    LOOKUP_FIRST: 0.1,
    LOOKUP_ALONE: 0.1,
    QUANTISED: 0.2,
    FEATURE_HEAD: 0.1,
    LEAVES: 0.1,
}
"""Weight of each kind; the kinds that can be drawn divide the draws by their weights."""


def kind_of(draft: Draft) -> str:
    """Return the group of a draft, a key of `SHARES` for the kinds drawn here. Raises ValueError for plain decoding."""
    if not draft.drafts:
        raise ValueError("plain decoding is not a draft")
    if draft.parts.tree is not None:
        return LEAVES
    if draft.parts.bits:
        return QUANTISED
    if not draft.runs_model:
        return LOOKUP_ALONE
    return LOOKUP_FIRST if draft.parts.lookup and draft.name != "feature head" else draft.label


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
    bits: Sequence[BitWidth] = ()
    """Precisions of quantised drafts; none are drawn without."""
    feature: FeatureHeadDraft | None = None
    """Draft of the feature head; none is drawn without."""
    with_leaves: bool = False
    """True to draw drafts with side leaves, too."""

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
        absent = {
            EXIT_WITH_HEAD: not self.head_drafts,
            QUANTISED: not self.bits,
            FEATURE_HEAD: self.feature is None,
            LEAVES: not self.with_leaves,
        }
        shares = {kind: share for kind, share in SHARES.items() if not absent.get(kind)}
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
            LOOKUP_ALONE: _lookup_alone,
            QUANTISED: self.quantised,
            FEATURE_HEAD: self.feature_head,
            LEAVES: self.leaves,
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

    def feature_head(self, stream: np.random.Generator) -> FeatureHeadDraft:
        """Return the only feature head, after a lookup half of the time."""
        assert self.feature is not None, "not drawn without"
        return self.feature.having(lookup=_lookup(stream)) if stream.random() < 0.5 else self.feature

    def leaves(self, stream: np.random.Generator) -> Draft:
        """Draw a tree beside a draft of another kind: fixed leaves or a tree sized by its gain, each half of the time."""
        others: list[Callable[[np.random.Generator], Draft]] = [self.skip_set, self.exit]
        others += [self.exit_with_head] if self.head_drafts else []
        others += [self.feature_head] if self.feature is not None else []
        others += [self.quantised] if self.bits else []
        draft = others[int(stream.integers(len(others)))](stream)
        if stream.random() < 0.5:
            return draft.having(tree=FixedLeaves(leaves=int(stream.integers(1, MOST_LEAVES + 1))))
        gain = round(float(np.exp(stream.uniform(*np.log(GAINS)))), 4)
        return draft.having(tree=SizedLeaves(least_gain=gain, max_leaves=int(stream.integers(2, 2 * MOST_LEAVES + 1))))

    def lookup_first(self, stream: np.random.Generator) -> Draft:
        """Draw a lookup before a draft of another kind."""
        others: list[Callable[[np.random.Generator], LayerSkip | EarlyExit]] = [self.skip_set, self.exit]
        others += [self.exit_with_head] if self.head_drafts else []
        draft = others[int(stream.integers(len(others)))](stream)
        return draft.having(lookup=_lookup(stream))

    def quantised(self, stream: np.random.Generator) -> Draft:
        """Draw the model or an exit with quantised weights, the model with up to a fifth of its sublayers left out.

        Half of the drafts come after a lookup.
        """
        bits = self.bits[int(stream.integers(len(self.bits)))]
        draft: LayerSkip | EarlyExit
        if stream.random() < 0.25:
            draft = self.exit_with_head(stream) if self.head_drafts else self.exit(stream)
        else:
            size = round(stream.uniform(0, MOST_SHARE_QUANTISED) * len(self.space.items))
            draft = self.space.draft(stream.choice(len(self.space.items), size, replace=False).tolist())
        draft = draft.having(bits=bits)
        return draft.having(lookup=_lookup(stream)) if stream.random() < 0.5 else draft


def _lookup(stream: np.random.Generator) -> FirstLookup:
    """Draw a prompt lookup or a suffix automaton, each half of the time."""
    num_copied = int(stream.integers(COPIED[0], COPIED[1] + 1))
    if stream.random() < 0.5:
        return Lookup(**_ngrams(stream), max_tokens=num_copied)
    min_match, factor, least = _match(stream)
    return SuffixLookup(min_match=min_match, max_spec_factor=factor, min_token_prob=least, max_tokens=num_copied)


def _lookup_alone(stream: np.random.Generator) -> PromptLookup | SuffixDraft:
    """Draw a prompt lookup or a suffix automaton, each half of the time."""
    if stream.random() < 0.5:
        return PromptLookup(**_ngrams(stream))
    min_match, factor, least = _match(stream)
    return SuffixDraft(min_match=min_match, max_spec_factor=factor, min_token_prob=least)


def _match(stream: np.random.Generator) -> tuple[int, float, float]:
    """Draw the shortest match, the tokens per token of the match, and the least probability."""
    return (
        int(stream.integers(1, MOST_NGRAM + 1)),
        round(stream.uniform(0.5, 8.0), 2),
        round(stream.uniform(0.0, 0.6), 2),
    )


def _ngrams(stream: np.random.Generator) -> dict[str, int]:
    most = int(stream.integers(1, MOST_NGRAM + 1))
    return {"max_ngram": most, "min_ngram": int(stream.integers(1, most + 1))}
