"""Which passes to time for a cost table: few, and so different from one another that every term shows (our formulation)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

from decoding.drafts import LayerSkip
from studies.costs.terms import DraftStep, Pass, Terms, Verification

FITTED_SHARES = ((0.5, 0.2), (0.2, 0.5), (0.8, 0.5))
"""Shares of the attention and of the MLP sublayers that drafts for the fit leave out at random."""
BLOCK_SHARES = (0.33, 0.67, 0.9)
"""Shares of the blocks that they leave out whole. The last shows what a draft costs beside its blocks."""
HELD_OUT_SHARES = ((0.15, 0.15), (0.3, 0.1), (0.4, 0.6), (0.6, 0.5))
PLACES = (0.5, 0.25, 0.75)
"""Where in the stack verifications for the fit resume; one of them for each width, in turn."""


def plan_passes(terms: Terms, seed: int) -> tuple[list[Pass], list[Pass]]:
    """The passes to fit to, and those held out to tell the error. Which sublayers are left out is drawn from `seed`."""
    stream = random.Random(seed)
    fitted = list(dict.fromkeys(_fitted_skips(terms, stream)))
    attentions = [LayerSkip(), *_attention_skips(terms, stream)]
    held_out = [skip for skip in dict.fromkeys(_held_out_skips(terms, stream)) if skip not in fitted]
    first, *others = terms.contexts
    looking = [DraftStep(skip, first, looks=True) for skip in fitted[: len(BLOCK_SHARES)]]
    return (
        # What depends on the context shows in drafts without attention; the rest is known from the first context.
        [*_steps([*attentions, *fitted], [first]), *looking, *_steps(attentions, others), *_verifications(terms)],
        [*_steps(held_out or fitted[-1:], terms.contexts), *_resumed(terms, stream)],
    )


def _steps(skips: Iterable[LayerSkip], contexts: Sequence[int]) -> Iterator[Pass]:
    return (DraftStep(skip, context) for skip in skips for context in contexts)


def _verifications(terms: Terms) -> Iterator[Pass]:
    """The whole model at every width and context, and resuming passes of all but the first width."""
    num_layers = terms.kinds.num_layers
    for context in terms.contexts:
        for number, width in enumerate(terms.widths):
            yield Verification(width, context)
            boundary = round(num_layers * PLACES[number % len(PLACES)])
            if width > 1 and 0 < boundary < num_layers:
                yield Verification(width, context, boundary)


def _resumed(terms: Terms, stream: random.Random) -> list[Pass]:
    """A resuming verification for each context, at a place of its own."""
    known = set(_verifications(terms))
    drawn: list[Pass] = []
    if terms.kinds.num_layers > 1:
        for context in terms.contexts:
            boundary = stream.randrange(1, terms.kinds.num_layers)
            drawn.append(Verification(stream.choice(terms.widths[1:]), context, boundary))
    return [each for each in drawn if each not in known]


def _fitted_skips(terms: Terms, stream: random.Random) -> Iterator[LayerSkip]:
    kinds, layers = terms.kinds, range(terms.kinds.num_layers)
    for share in BLOCK_SHARES:
        yield LayerSkip.blocks(_drawn(layers, share, stream))
    for shares in FITTED_SHARES:
        yield _mixed(terms, shares, stream)
    for kind in sorted(set(kinds.block)):
        yield LayerSkip.blocks(_drawn(_places(kinds.block, kind), 0.5, stream))
    for kind in sorted(number for number in set(kinds.mlp) if number is not None):
        yield LayerSkip(skip_mlp=_drawn(_places(kinds.mlp, kind), 0.5, stream))


def _attention_skips(terms: Terms, stream: random.Random) -> Iterator[LayerSkip]:
    kinds = terms.kinds.attention
    for kind in sorted(number for number in set(kinds) if number is not None):
        yield LayerSkip(skip_attention=_drawn(_places(kinds, kind), 0.5, stream))


def _held_out_skips(terms: Terms, stream: random.Random) -> Iterator[LayerSkip]:
    num_layers = terms.kinds.num_layers
    for shares in HELD_OUT_SHARES:
        yield _mixed(terms, shares, stream)
    yield LayerSkip.blocks(_drawn(range(num_layers), 0.5, stream))
    yield LayerSkip.blocks(tuple(range(max(num_layers // 3, 1), num_layers)))  # an early exit


def _mixed(terms: Terms, shares: tuple[float, float], stream: random.Random) -> LayerSkip:
    """Sublayers drawn at random, attention and MLP apart; blocks that show no sublayers are left out as wholes or not at all."""
    kinds = terms.kinds
    attention, mlp = (
        _drawn([index for index, kind in enumerate(each) if kind is not None], share, stream)
        for each, share in zip((kinds.attention, kinds.mlp), shares, strict=True)
    )
    closed = [index for index in range(kinds.num_layers) if kinds.attention[index] is None or kinds.mlp[index] is None]
    whole = _drawn(closed, min(shares), stream)
    return LayerSkip(skip_attention=tuple(sorted({*attention, *whole})), skip_mlp=tuple(sorted({*mlp, *whole})))


def _places(kinds: Sequence[int | None], kind: int) -> list[int]:
    return [index for index, number in enumerate(kinds) if number == kind]


def _drawn(indices: Sequence[int], share: float, stream: random.Random) -> tuple[int, ...]:
    """This share of the indices, at least one if there are any."""
    count = min(max(round(share * len(indices)), 1), len(indices))
    return tuple(sorted(stream.sample(list(indices), count)))
