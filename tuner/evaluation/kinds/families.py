"""Families of drafts: the settings of each registered kind among which the best is chosen, for the model and its heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import get_args

from decoding.documents.strict_yaml import suggest
from decoding.drafts import (
    KINDS,
    BitWidth,
    Draft,
    EarlyExit,
    FeatureHeadDraft,
    LayerSkip,
    PromptLookup,
    SuffixDraft,
)
from decoding.target import Target
from studies.prediction.pools import NGRAMS, SUFFIXES
from studies.prediction.predictor import Predictor
from studies.prediction.proposals import Proposals
from studies.prediction.skip_space import SkipSpace
from tuner.errors import ConfigError

SKIP_SET, EXIT, EXIT_WITH_HEAD, FEATURE_HEAD = "skip set", "exit", "exit with head", "feature head"
LOOKUP, LEAVES, MODEL = "lookup", "leaves", "model"
PARTS = (SKIP_SET, EXIT, EXIT_WITH_HEAD, FEATURE_HEAD, LOOKUP, LEAVES)


def precision_name(bits: BitWidth) -> str:
    """Return the name of a precision as a kind."""
    return f"int{bits}"


USES = (*PARTS, *(precision_name(bits) for bits in get_args(BitWidth)))
"""What a row may use: the kinds of the third table, and the names that `--only` takes."""


@dataclass(frozen=True)
class Offer:
    """What the model and its heads offer, and how many skip sets are worth rating."""

    target: Target
    heads: Mapping[int, EarlyExit]
    """Drafts of the exits that have a head, by exit layer."""
    feature: FeatureHeadDraft | None
    num_skip_sets: int


@dataclass(frozen=True)
class DraftFamily:
    """Drafts of one kind that differ in their settings only."""

    name: str
    uses: frozenset[str]
    propose: Callable[[Predictor], Sequence[Draft]]
    """Returns the drafts; the predictor is there to look for some."""
    only_quantised: bool = False
    """True for the model itself, which is a draft in another precision only."""


def check_uses(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a name that is none of `USES`."""
    for name in names:
        if name not in USES:
            raise ConfigError(f"only: unknown kind {name!r}; {suggest(name, USES)}")


def families_of(offer: Offer) -> Iterator[DraftFamily]:
    """Yield the families of every registered kind that has proposals, as far as the model and the heads offer them."""
    for kind in KINDS:
        if kind in PROPOSALS:
            yield from PROPOSALS[kind](offer)


def kinds_without_proposals() -> list[str]:
    """Return the registered kinds that draft and have no proposals here: they are in no table."""
    return [kind for kind, entry in KINDS.items() if entry.document.drafts and kind not in PROPOSALS]


def _copies(offer: Offer) -> Iterator[DraftFamily]:
    drafts = [PromptLookup(max_ngram=most, min_ngram=fewest) for most, fewest in NGRAMS]
    yield DraftFamily("prompt lookup", frozenset({LOOKUP}), lambda predictor: drafts)


def _suffixes(offer: Offer) -> Iterator[DraftFamily]:
    drafts = [SuffixDraft(**settings) for settings in SUFFIXES]
    yield DraftFamily("suffix automaton", frozenset({LOOKUP}), lambda predictor: drafts)


def _skips(offer: Offer) -> Iterator[DraftFamily]:
    if offer.target.num_layers < 2:
        return
    yield DraftFamily(MODEL, frozenset(), lambda predictor: [LayerSkip()], only_quantised=True)
    yield DraftFamily(SKIP_SET, frozenset({SKIP_SET}), lambda predictor: _skip_sets(offer, predictor))


def _skip_sets(offer: Offer, predictor: Predictor) -> list[Draft]:
    """Return the rated skip sets without exits, best first."""
    num_layers = offer.target.num_layers
    proposals = Proposals(SkipSpace.of(offer.target), predictor)
    for _ in islice(proposals.rate(), offer.num_skip_sets):
        pass
    as_exits = {EarlyExit(exit_layer=layer).skipped(num_layers) for layer in range(1, num_layers)}
    return [each.draft for each in proposals.best_first() if each.draft not in as_exits]


def _exits(offer: Offer) -> Iterator[DraftFamily]:
    exits = [EarlyExit(exit_layer=layer) for layer in range(1, offer.target.num_layers)]
    if exits:
        yield DraftFamily(EXIT, frozenset({EXIT}), lambda predictor: exits)
    if offer.heads:
        yield DraftFamily(EXIT_WITH_HEAD, frozenset({EXIT_WITH_HEAD}), lambda predictor: list(offer.heads.values()))


def _feature_heads(offer: Offer) -> Iterator[DraftFamily]:
    if (draft := offer.feature) is not None:
        yield DraftFamily(FEATURE_HEAD, frozenset({FEATURE_HEAD}), lambda predictor: [draft])


PROPOSALS: dict[str, Callable[[Offer], Iterator[DraftFamily]]] = {
    "prompt_lookup": _copies,
    "suffix_automaton": _suffixes,
    "layer_skip": _skips,
    "early_exit": _exits,
    "feature_head": _feature_heads,
}
"""Families of each kind of `decoding.drafts.KINDS`. A new kind needs an entry to be in the tables."""
