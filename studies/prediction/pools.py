"""Pools: the few drafts that a guided search measures, chosen by prediction alone.

A pool holds the best drafts of each kind, and no two nearly equal skip sets: predictions cannot tell such sets apart, and a trial
of one is informative for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from decoding.drafts import (
    BitWidth,
    Draft,
    FirstLookup,
    LayerSkip,
    Lookup,
    PromptLookup,
    SuffixDraft,
    SuffixLookup,
)
from studies.prediction.predictor import Predictor
from studies.prediction.predictors import Prediction

DISTANCE = 3
"""Smallest number of sublayers in which two skip sets of a pool differ."""
NGRAMS = tuple((most, fewest) for most in (2, 3, 5) for fewest in (1, 2, 3) if fewest <= most)
"""Longest and shortest n-gram of the lookups that are tried."""
SUFFIXES = tuple({"max_spec_factor": factor, "min_token_prob": 0.3} for factor in (2.0, 4.0, 64.0))
"""Tokens per token of the match, and least estimated probability, of the suffix automata that are tried. By replay, 2 is the best
on answers of SmolLM2-135M, and 4 or more on the code of the demo."""
COPIED = (2, 4, 8)
"""Tokens to copy, of the lookups that are tried before other drafts."""
CHECKED = tuple((5, fewest, direct) for fewest in (1, 2) for direct in (3, 4))
"""Longest and shortest n-gram, and the shortest whose copy is verified at once, of the lookups whose copies the draft checks."""
NUM_WITH_LOOKUPS = 2
"""Number of drafts that lookups are tried before."""
LEAST_AGREEMENT = 0.6
"""Share of positions at which the whole model in a precision must agree with the target. Rounding adds to the harm of a skip, so
that no other draft in that precision agrees more."""


def best_of(predictions: Iterable[Prediction], count: int) -> list[Draft]:
    """Return the drafts of the `count` best predictions."""
    return [each.draft for each in sorted(predictions, key=lambda each: -each.speedup)[:count]]


def unlike(predictions: Iterable[Prediction], count: int, num_layers: int) -> list[Draft]:
    """Return the best drafts, at most `count`, that differ in at least `DISTANCE` sublayers from each better one."""
    chosen: list[Draft] = []
    for prediction in sorted(predictions, key=lambda each: -each.speedup):
        if all(_distance(prediction.draft, other, num_layers) >= DISTANCE for other in chosen):
            chosen.append(prediction.draft)
        if len(chosen) == count:
            break
    return chosen


def lookups(predictor: Predictor, count: int) -> list[Draft]:
    """Return the `count` best prompt lookups and suffix automata."""
    alone: list[Draft] = [PromptLookup(max_ngram=most, min_ngram=fewest) for most, fewest in NGRAMS]
    alone += [SuffixDraft(**settings) for settings in SUFFIXES]
    return best_of(predictor.best_first(alone), count)


def lookups_before(predictor: Predictor, drafts: Sequence[Draft], count: int) -> list[Draft]:
    """Return the first of `drafts` with a lookup before them: the `count` best combinations."""
    tried: list[FirstLookup] = [
        Lookup(max_ngram=most, min_ngram=fewest, max_tokens=copied) for most, fewest in NGRAMS for copied in COPIED
    ]
    tried += [
        Lookup(max_ngram=most, min_ngram=fewest, direct_from=direct, max_tokens=copied)
        for most, fewest, direct in CHECKED
        for copied in COPIED
    ]
    tried += [SuffixLookup(**settings, max_tokens=copied) for settings in SUFFIXES for copied in COPIED]
    combined = [
        draft.having(lookup=lookup)
        for draft in drafts[:NUM_WITH_LOOKUPS]
        if "lookup" in draft.takes
        for lookup in tried
    ]
    return best_of(predictor.best_first(combined), count)


def useful_precisions(predictor: Predictor, precisions: Iterable[BitWidth]) -> list[BitWidth]:
    """Return the precisions in which the whole model agrees with the target often enough: one recording each."""
    whole = {bits: predictor.best(LayerSkip(bits=bits)) for bits in precisions}
    return [bits for bits, prediction in whole.items() if prediction.agreement >= LEAST_AGREEMENT]


def quantised(drafts: Iterable[Draft], precisions: Sequence[BitWidth]) -> list[Draft]:
    """Return each of `drafts` in every precision, as far as its kind can be quantised."""
    return [draft.having(bits=bits) for draft in drafts if "bits" in draft.takes for bits in precisions]


def from_fewer_ids(predictor: Predictor, draft: Draft, below: int | None) -> Draft:
    """Return the draft, or the same from the token ids `below` this and the text's, whichever is predicted to be faster."""
    if below is None or not predictor.accepts(fewer := draft.having(ids_below=below)):
        return draft
    return predictor.best_first([draft, fewer])[0].draft


def is_same(one: Draft, other: Draft, num_layers: int) -> bool:
    """Return whether two drafts skip the same sublayers in one precision; an exit without a head is a skip set too."""
    return _distance(one, other, num_layers) == 0


def _distance(one: Draft, other: Draft, num_layers: int) -> float:
    """Return the number of sublayers in which two skip sets differ; infinity for other kinds, or in different precisions."""
    if one.parts.bits != other.parts.bits:
        return float("inf")
    skips = [_skipped(draft, num_layers) for draft in (one, other)]
    if skips[0] is None or skips[1] is None:
        return 0.0 if one == other else float("inf")
    return float(len(skips[0] ^ skips[1]))


def _skipped(draft: Draft, num_layers: int) -> set[tuple[str, int]] | None:
    """Return the sublayers skipped by a draft without head and lookup; None for any other draft."""
    if not draft.runs_model or draft.trained_head is not None or draft.parts.lookup is not None:
        return None
    skip = draft.skipped(num_layers)
    return {("attention", index) for index in skip.skip_attention} | {("mlp", index) for index in skip.skip_mlp}
