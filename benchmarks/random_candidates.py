"""Random configurations of every kind, good and bad ones: what a search measures are mostly good drafts.

Sizes and settings are drawn uniformly from the whole range, and each kind of draft has its share of the draws. Our choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from decoding.draft_length import RULES
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
from decoding.target import Target
from studies.contract import Candidate
from studies.prediction.skip_space import SkipSpace
from studies.rule_space import draw_rule

SKIPPED = (0.05, 0.65)
"""Least and largest share of the sublayers that a skip set skips."""
MOST_SKIPPED_QUANTISED = 0.2
"""Largest share that a quantised draft skips: rounding adds to the harm of a skip."""
LATE = 0.5
"""Share of the contiguous skip sets that end with the last block but one, where models are often most redundant."""
MOST_NGRAM, COPIED = 5, (2, 8)
MOST_LEAVES, GAINS = 4, (0.01, 0.3)
"""Most side leaves at each depth; least and highest expected gain of a leaf, in trees that are sized by it."""
TRIES = 50
"""Draws in search of a new configuration, before giving up."""
SHARES = {
    "skip set": 0.4,
    "exit": 0.2,
    "exit with head": 0.2,
    "lookup first": 0.1,
    "lookup alone": 0.1,
    "quantised": 0.2,
    "feature head": 0.1,
    "leaves": 0.1,
}
"""Weight of each kind among the kinds that can be drawn."""


def kind_of(draft: Draft) -> str:
    """Return the group of a draft, a key of `SHARES` for the kinds drawn here. Raises ValueError for plain decoding."""
    if not draft.drafts:
        raise ValueError("plain decoding is not a draft")
    if draft.parts.tree is not None:
        return "leaves"
    if draft.parts.bits:
        return "quantised"
    if not draft.runs_model:
        return "lookup alone"
    return "lookup first" if draft.parts.lookup and draft.name != "feature head" else draft.label


def random_candidates(
    target: Target,
    count: int,
    seed: int,
    *,
    rules: Sequence[str] = tuple(RULES),
    max_tokens: int = 8,
    heads: Mapping[int, EarlyExit] | None = None,
    bits: Sequence[BitWidth] = (),
    feature: FeatureHeadDraft | None = None,
    with_leaves: bool = False,
) -> list[Candidate]:
    """Return `count` different configurations of the model in random order, or as many as exist; rules alternate.

    `heads` are the exits with a head, by exit layer. Drafts with a head, of `bits` or with leaves are drawn only if there are any.
    """
    stream = np.random.default_rng(seed)
    drawers = _drawers(target, stream, heads or {}, bits, feature)
    if not (with_leaves and target.checks.takes_trees):
        del drawers["leaves"]
    drawn: dict[str, Candidate] = {}
    for kind, wanted in _counts(count, list(drawers)).items():
        first = int(stream.integers(len(rules)))
        for number in range(wanted):
            rule = rules[(first + number) % len(rules)]
            for _ in range(TRIES):
                found = Candidate(draft=drawers[kind](), draft_length=draw_rule(rule, max_tokens, stream))
                if found.key not in drawn:
                    drawn[found.key] = found
                    break
    return [list(drawn.values())[index] for index in stream.permutation(len(drawn))]


def _counts(count: int, kinds: Sequence[str]) -> dict[str, int]:
    """Return the number of each kind: the shares of `count`, rounded so that they add up."""
    exact = {kind: count * SHARES[kind] / sum(SHARES[each] for each in kinds) for kind in kinds}
    counts = {kind: int(number) for kind, number in exact.items()}
    for kind in sorted(exact, key=lambda kind: counts[kind] - exact[kind])[: count - sum(counts.values())]:
        counts[kind] += 1
    return counts


def _drawers(
    target: Target,
    stream: np.random.Generator,
    heads: Mapping[int, EarlyExit],
    bits: Sequence[BitWidth],
    feature: FeatureHeadDraft | None,
) -> dict[str, Callable[[], Draft]]:
    """Return a function for each kind that can be drawn, in the order of `SHARES`."""
    space, num_layers = SkipSpace.of(target), target.num_layers

    def some_of(share: float, least: int) -> LayerSkip:
        size = max(round(share * len(space.items)), least)
        return space.draft(stream.choice(len(space.items), size, replace=False).tolist())

    def skip_set() -> Draft:
        share = stream.uniform(*SKIPPED)
        if stream.random() < 0.5:
            return some_of(share, 1)
        length = min(max(round(share * num_layers), 1), num_layers - 1)
        latest = num_layers - 1 - length  # the last block stays
        first = latest if stream.random() < LATE else int(stream.integers(latest + 1))
        return LayerSkip.blocks(tuple(range(first, first + length)))

    def early_exit() -> EarlyExit:
        return EarlyExit(exit_layer=int(stream.integers(1, num_layers)))

    def with_head() -> EarlyExit:
        return heads[int(stream.choice(sorted(heads)))]

    def quantised() -> Draft:
        width = bits[int(stream.integers(len(bits)))]
        draft: LayerSkip | EarlyExit
        if stream.random() < 0.25:
            draft = with_head() if heads else early_exit()
        else:
            draft = some_of(stream.uniform(0, MOST_SKIPPED_QUANTISED), 0)
        return _sometimes_after_lookup(draft.having(bits=width), stream)

    def leaves() -> Draft:
        others = [skip_set, early_exit, *(drawers[kind] for kind in found if kind in drawers)]
        draft = others[int(stream.integers(len(others)))]()
        if stream.random() < 0.5:
            return draft.having(tree=FixedLeaves(leaves=int(stream.integers(1, MOST_LEAVES + 1))))
        gain = round(float(np.exp(stream.uniform(*np.log(GAINS)))), 4)
        return draft.having(tree=SizedLeaves(least_gain=gain, max_leaves=int(stream.integers(2, 2 * MOST_LEAVES + 1))))

    def lookup_first() -> Draft:
        others = [skip_set, early_exit, *([with_head] if heads else [])]
        return others[int(stream.integers(len(others)))]().having(lookup=_lookup(stream))

    found = ("exit with head", "feature head", "quantised")
    drawers: dict[str, Callable[[], Draft]] = {"skip set": skip_set, "exit": early_exit}
    if heads:
        drawers["exit with head"] = with_head
    drawers |= {"lookup first": lookup_first, "lookup alone": lambda: _lookup_alone(stream)}
    if bits:
        drawers["quantised"] = quantised
    if feature is not None:
        drawers["feature head"] = lambda: _sometimes_after_lookup(feature, stream)
    return {**drawers, "leaves": leaves}


def _sometimes_after_lookup(draft: Draft, stream: np.random.Generator) -> Draft:
    return draft.having(lookup=_lookup(stream)) if stream.random() < 0.5 else draft


def _lookup(stream: np.random.Generator) -> FirstLookup:
    """Draw a prompt lookup or a suffix automaton, each half of the time."""
    num_copied = int(stream.integers(COPIED[0], COPIED[1] + 1))
    if stream.random() < 0.5:
        return Lookup(**_ngrams(stream), max_tokens=num_copied)
    return SuffixLookup(**_match(stream), max_tokens=num_copied)


def _lookup_alone(stream: np.random.Generator) -> Draft:
    return PromptLookup(**_ngrams(stream)) if stream.random() < 0.5 else SuffixDraft(**_match(stream))


def _match(stream: np.random.Generator) -> dict[str, float]:
    return {
        "min_match": int(stream.integers(1, MOST_NGRAM + 1)),
        "max_spec_factor": round(stream.uniform(0.5, 8.0), 2),
        "min_token_prob": round(stream.uniform(0.0, 0.6), 2),
    }


def _ngrams(stream: np.random.Generator) -> dict[str, int]:
    most = int(stream.integers(1, MOST_NGRAM + 1))
    return {"max_ngram": most, "min_ngram": int(stream.integers(1, most + 1))}
