"""Choice of the passes to time for a cost table (our formulation).

Passes are few, and different enough to separate all terms.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

from decoding.drafts import LayerSkip
from studies.costs.terms import DraftStep, Pass, Terms, Verification

FITTED_SHARES = ((0.5, 0.2), (0.2, 0.5), (0.8, 0.5))
"""Shares of attention and of MLP sublayers that drafts for the fit skip, drawn at random."""
BLOCK_SHARES = (0.33, 0.67, 0.9)
"""Shares of whole blocks that drafts for the fit skip. The largest share exposes a draft's costs outside its blocks."""
HELD_OUT_SHARES = ((0.15, 0.15), (0.3, 0.1), (0.4, 0.6), (0.6, 0.5))
FITTED_IDS, HELD_OUT_IDS = 0.25, 0.125
"""Shares of the token ids that quantised drafts for the fit, and for its error, choose from."""
NUM_HELD_OUT_QUANTISED = 2
"""Number of skips that quantised passes for the error have, in each precision."""
BOUNDARIES = (0.5, 0.25, 0.75)
"""Relative depths at which verifications for the fit resume; each width uses the next one in turn."""
RESUMED_AGAIN = 3
"""After contexts beyond the first, verifications resume at one of that many widths: how the cost of a pass divides between its
blocks and the rest hardly depends on the context."""


def plan_passes(terms: Terms, seed: int) -> tuple[list[Pass], list[Pass]]:
    """Return passes for the fit and held-out passes for its error.

    `seed` determines the skipped sublayers."""
    stream = random.Random(seed)
    fitted = list(dict.fromkeys(_fitted_skips(terms, stream)))
    attentions = [LayerSkip(), *_attention_skips(terms, stream)]
    held_out = [skip for skip in dict.fromkeys(_held_out_skips(terms, stream)) if skip not in fitted]
    first, *others = terms.contexts
    quantised, held_out_quantised = _quantised(terms, [*attentions, *fitted], held_out or fitted[-1:])
    looking = [DraftStep(skip, first, looks=True) for skip in fitted[: len(BLOCK_SHARES)]]
    return (
        # Skipping attention isolates the cost that depends on the context; the first context determines all other terms.
        [
            *_steps([*attentions, *fitted], [first]),
            *looking,
            *_steps(attentions, others),
            *_verifications(terms),
            *quantised,
        ],
        [
            *_checks(held_out or fitted[-1:], terms.contexts),
            *_resumed(terms, stream),
            *held_out_quantised,
        ],
    )


def _quantised(
    terms: Terms, fitted: Sequence[LayerSkip], held_out: Sequence[LayerSkip]
) -> tuple[list[Pass], list[Pass]]:
    """Return quantised draft steps for the fit, all after the first context, and for its error, after any.

    The same skips separate the sublayers' costs in every precision.
    """
    timed, checked = list[Pass](), list[Pass]()
    for bits in terms.bits:
        every, others = (
            [skip.having(bits=bits) for skip in skips] for skips in (fitted, held_out[:NUM_HELD_OUT_QUANTISED])
        )
        timed += [*_steps(every, terms.contexts[:1]), *_narrow(terms, every[0], FITTED_IDS)]
        checked += [*_checks(others, terms.contexts), *_narrow(terms, every[-1], HELD_OUT_IDS)]
    return timed, checked


def _narrow(terms: Terms, skip: LayerSkip, share: float) -> list[Pass]:
    """Return a step that chooses from a share of the token ids; none if drafts choose from all."""
    if terms.num_tokens is None:
        return []
    return [DraftStep(skip.having(ids_below=max(1, round(share * terms.num_tokens))), terms.contexts[0])]


def _steps(skips: Iterable[LayerSkip], contexts: Sequence[int]) -> Iterator[Pass]:
    return (DraftStep(skip, context) for skip in skips for context in contexts)


def _checks(skips: Sequence[LayerSkip], contexts: Sequence[int]) -> Iterator[Pass]:
    """Yield a draft step of each skip after the first context, and of every second skip after each further context."""
    yield from _steps(skips, contexts[:1])
    yield from _steps(skips[::2], contexts[1:])


def _verifications(terms: Terms) -> Iterator[Pass]:
    """Yield full verifications at all widths, and resuming ones at widths above 1, fewer of them after the first context.

    The widest resumes after every context.
    """
    num_layers, last = terms.kinds.num_layers, len(terms.widths) - 1
    for context in terms.contexts:
        for number, width in enumerate(terms.widths):
            yield Verification(width, context)
            resumes = context == terms.contexts[0] or (last - number) % RESUMED_AGAIN == 0
            boundary = round(num_layers * BOUNDARIES[number % len(BOUNDARIES)])
            if resumes and width > 1 and 0 < boundary < num_layers:
                yield Verification(width, context, boundary)


def _resumed(terms: Terms, stream: random.Random) -> list[Pass]:
    """Return a resuming verification per context, each at a random boundary."""
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
        yield LayerSkip.blocks(_drawn(_indices(kinds.block, kind), 0.5, stream))
    for kind in sorted(number for number in set(kinds.mlp) if number is not None):
        yield LayerSkip(skip_mlp=_drawn(_indices(kinds.mlp, kind), 0.5, stream))


def _attention_skips(terms: Terms, stream: random.Random) -> Iterator[LayerSkip]:
    kinds = terms.kinds.attention
    for kind in sorted(number for number in set(kinds) if number is not None):
        yield LayerSkip(skip_attention=_drawn(_indices(kinds, kind), 0.5, stream))


def _held_out_skips(terms: Terms, stream: random.Random) -> Iterator[LayerSkip]:
    num_layers = terms.kinds.num_layers
    for shares in HELD_OUT_SHARES:
        yield _mixed(terms, shares, stream)
    yield LayerSkip.blocks(_drawn(range(num_layers), 0.5, stream))
    yield LayerSkip.blocks(tuple(range(max(num_layers // 3, 1), num_layers)))  # an early exit


def _mixed(terms: Terms, shares: tuple[float, float], stream: random.Random) -> LayerSkip:
    """Return a skip set of attention and MLP sublayers drawn at random.

    Blocks whose sublayers cannot be skipped separately are skipped whole or not at all.
    """
    kinds = terms.kinds
    attention, mlp = (
        _drawn([index for index, kind in enumerate(each) if kind is not None], share, stream)
        for each, share in zip((kinds.attention, kinds.mlp), shares, strict=True)
    )
    closed = [index for index in range(kinds.num_layers) if kinds.attention[index] is None or kinds.mlp[index] is None]
    whole = _drawn(closed, min(shares), stream)
    return LayerSkip(skip_attention=tuple(sorted({*attention, *whole})), skip_mlp=tuple(sorted({*mlp, *whole})))


def _indices(kinds: Sequence[int | None], kind: int) -> list[int]:
    return [index for index, number in enumerate(kinds) if number == kind]


def _drawn(indices: Sequence[int], share: float, stream: random.Random) -> tuple[int, ...]:
    """Return a random `share` of the indices, at least one if there are any."""
    count = min(max(round(share * len(indices)), 1), len(indices))
    return tuple(sorted(stream.sample(list(indices), count)))
