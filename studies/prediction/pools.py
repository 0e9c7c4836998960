"""Pools: the few drafts, of all that could be thought of, that a guided search measures. Chosen by prediction alone.

A pool holds the best of each kind, and no two skip sets that are nearly the same: what tells those apart is too little to be
foretold, and measuring one of them teaches what there is to learn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from decoding.drafts import Draft, Lookup, PromptLookup
from studies.prediction.contract import Prediction
from studies.prediction.predictor import Predictor

DISTANCE = 3
"""Sublayers in which two skip sets of a pool differ at least."""
NGRAMS = tuple((most, fewest) for most in (2, 3, 5) for fewest in (1, 2, 3) if fewest <= most)
"""Longest and shortest n-gram that a lookup compares."""
COPIED = (2, 4, 8)
"""Tokens that a lookup in front of a draft may copy."""
LOOKED_BEHIND = 2
"""Drafts of the model that lookups are put in front of."""


def best_of(predictions: Iterable[Prediction], count: int) -> list[Draft]:
    """The drafts of the `count` best predictions."""
    return [each.draft for each in sorted(predictions, key=lambda each: -each.speedup)[:count]]


def unlike(predictions: Iterable[Prediction], count: int, num_layers: int, distance: int = DISTANCE) -> list[Draft]:
    """The best drafts of the model, at most `count`, that differ in at least `distance` sublayers from each better one."""
    chosen: list[Draft] = []
    for prediction in sorted(predictions, key=lambda each: -each.speedup):
        if all(_distance(prediction.draft, other, num_layers) >= distance for other in chosen):
            chosen.append(prediction.draft)
        if len(chosen) == count:
            break
    return chosen


def lookups(predictor: Predictor, count: int) -> list[Draft]:
    """The `count` best prompt lookups."""
    alone = [PromptLookup(max_ngram=most, min_ngram=fewest) for most, fewest in NGRAMS]
    return best_of(predictor.best_first(alone), count)


def lookups_before(predictor: Predictor, behind: Sequence[Draft], count: int) -> list[Draft]:
    """The `count` best lookups in front of the first drafts of `behind`."""
    fronts = [
        Lookup(max_ngram=most, min_ngram=fewest, max_tokens=copied) for most, fewest in NGRAMS for copied in COPIED
    ]
    in_front: list[Draft] = [
        draft.with_lookup(front) for draft in behind[:LOOKED_BEHIND] if draft.takes_lookup for front in fronts
    ]
    return best_of(predictor.best_first(in_front), count)


def is_same(one: Draft, other: Draft, num_layers: int) -> bool:
    """Whether two drafts leave out the same, an exit without a head being a skip set too."""
    return _distance(one, other, num_layers) == 0


def _distance(one: Draft, other: Draft, num_layers: int) -> float:
    """In how many sublayers two drafts of the model differ; infinitely many for drafts of other kinds."""
    skips = [_skipped(draft, num_layers) for draft in (one, other)]
    if skips[0] is None or skips[1] is None:
        return 0.0 if one == other else float("inf")
    return float(len(skips[0] ^ skips[1]))


def _skipped(draft: Draft, num_layers: int) -> set[tuple[str, int]] | None:
    """The sublayers that a draft without head and lookup leaves out; None for any other."""
    if not draft.runs_model or draft.has_head or draft.lookup_first is not None:
        return None
    skip = draft.skipped(num_layers)
    return {("attention", index) for index in skip.skip_attention} | {("mlp", index) for index in skip.skip_mlp}
