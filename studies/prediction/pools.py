"""Pools: the few drafts, of all that could be thought of, that a guided search measures. Chosen by prediction alone.

A pool holds the best of each kind, and no two skip sets that are nearly the same: what tells those apart is too little to be
foretold, and measuring one of them teaches what there is to learn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from decoding.drafts import EarlyExit, LayerSkip, Lookup, PromptLookup
from studies.prediction.predictor import Drafting, Prediction, Predictor

DISTANCE = 3
"""Sublayers in which two skip sets of a pool differ at least."""
NGRAMS = tuple((most, fewest) for most in (2, 3, 5) for fewest in (1, 2, 3) if fewest <= most)
"""Longest and shortest n-gram that a lookup compares."""
COPIED = (2, 4, 8)
"""Tokens that a lookup in front of a draft may copy."""
LOOKED_BEHIND = 2
"""Drafts of the model that lookups are put in front of."""


def best_of(predictions: Iterable[Prediction], count: int) -> list[Drafting]:
    """The drafts of the `count` best predictions."""
    return [each.draft for each in sorted(predictions, key=lambda each: -each.speedup)[:count]]


def unlike(predictions: Iterable[Prediction], count: int, num_layers: int, distance: int = DISTANCE) -> list[Drafting]:
    """The best drafts of the model, at most `count`, that differ in at least `distance` sublayers from each better one."""
    chosen: list[Drafting] = []
    for prediction in sorted(predictions, key=lambda each: -each.speedup):
        if all(_distance(prediction.draft, other, num_layers) >= distance for other in chosen):
            chosen.append(prediction.draft)
        if len(chosen) == count:
            break
    return chosen


def lookups(predictor: Predictor, count: int) -> list[Drafting]:
    """The `count` best prompt lookups."""
    alone = [PromptLookup(max_ngram=most, min_ngram=fewest) for most, fewest in NGRAMS]
    return best_of(predictor.best_first(alone), count)


def lookups_before(predictor: Predictor, behind: Sequence[Drafting], count: int) -> list[Drafting]:
    """The `count` best lookups in front of the first drafts of `behind`."""
    fronts = [
        Lookup(max_ngram=most, min_ngram=fewest, max_tokens=copied) for most, fewest in NGRAMS for copied in COPIED
    ]
    in_front: list[Drafting] = [
        draft.model_copy(update={"lookup": front})
        for draft in behind[:LOOKED_BEHIND]
        if not isinstance(draft, PromptLookup)
        for front in fronts
    ]
    return best_of(predictor.best_first(in_front), count)


def is_same(one: Drafting, other: Drafting, num_layers: int) -> bool:
    """Whether two drafts leave out the same, an exit without a head being a skip set too."""
    return _distance(one, other, num_layers) == 0


def _distance(one: Drafting, other: Drafting, num_layers: int) -> float:
    """In how many sublayers two drafts of the model differ; infinitely many for drafts of other kinds."""
    skips = [_skipped(draft, num_layers) for draft in (one, other)]
    if skips[0] is None or skips[1] is None:
        return 0.0 if one == other else float("inf")
    return float(len(skips[0] ^ skips[1]))


def _skipped(draft: Drafting, num_layers: int) -> set[tuple[str, int]] | None:
    """The sublayers that a draft without head and lookup leaves out; None for any other."""
    if isinstance(draft, PromptLookup) or draft.lookup is not None:
        return None
    if isinstance(draft, EarlyExit):
        if draft.head is not None:
            return None
        draft = draft.skipped(num_layers)
    assert isinstance(draft, LayerSkip), "an exit without a head leaves out the blocks behind it"
    return {("attention", index) for index in draft.skip_attention} | {("mlp", index) for index in draft.skip_mlp}
