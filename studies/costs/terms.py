"""The terms of passes: their seconds add up to the time of any draft step and any verification (our formulation).

KnapSpec (arXiv 2602.20217) has the idea of sublayers as items with measured latency by context length. Ours adds the rest of a
block with one skipped sublayer, and verifications that resume after a prefix.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray
from torch import nn

from decoding.documents.strict_yaml import Document
from decoding.drafts import BitWidth, LayerSkip
from decoding.target import Sublayer, Target

Vector = NDArray[np.float64]


class BlockKinds(Document):
    """The similar parts of a model's blocks: for each block, the number of the kind of its frame and of its sublayers.

    The frame is the part of a block that remains while any of it runs: norms, residual additions, dispatch. A sublayer without a
    module of its own (None) cannot be skipped alone, and belongs to the frame.
    """

    frame: tuple[int, ...]
    attention: tuple[int | None, ...]
    mlp: tuple[int | None, ...]

    @classmethod
    def of(cls, target: Target) -> BlockKinds:
        """Return the kinds of a model; similar parts have the same class, number of weights and attention type."""
        types = getattr(target.config, "layer_types", None) or [None] * target.num_layers
        frames, attention, mlp = [], [], []
        for block, *parts, kind in zip(target.blocks, target.anatomy.attention, target.anatomy.mlp, types, strict=True):
            modules = [_module(block, part) for part in parts]
            inside = sum(_num_weights(each) for each in modules if each is not None)
            frames.append((type(block).__name__, _num_weights(block) - inside))
            attention.append(_traits(modules[0], kind))
            mlp.append(_traits(modules[1]))
        frame = tuple(number for number in _numbered(frames) if number is not None)
        return cls(frame=frame, attention=_numbered(attention), mlp=_numbered(mlp))

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.frame)

    @cached_property
    def block(self) -> tuple[int, ...]:
        """The kind of each block as a whole."""
        numbers = _numbered(list(zip(self.frame, self.attention, self.mlp, strict=True)))
        return tuple(number for number in numbers if number is not None)

    def check(self, skip: LayerSkip) -> None:
        """Raise ValueError unless the model can skip these sublayers."""
        sublayers = {"attention": (skip.skip_attention, self.attention), "MLP": (skip.skip_mlp, self.mlp)}
        whole = set(skip.skip_attention) & set(skip.skip_mlp)
        for name, (skipped, kinds) in sublayers.items():
            for index in skipped:
                if index not in whole and kinds[index] is None:
                    raise ValueError(
                        f"block {index} has no separate {name} module: only the whole block can be skipped"
                    )


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One token drafted without the sublayers of `skip`, after `context` tokens, with the choice of the token."""

    skip: LayerSkip
    context: float
    has_head: bool = False
    """True if a block of the last one's kind follows the others."""
    looks: bool = False
    """True if a rule looks at the distribution before the next step."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The whole model over `width` tokens after `context`; blocks before `boundary` process the last token only."""

    width: int
    context: float
    boundary: int = 0


Pass = DraftStep | Verification


@dataclass(frozen=True)
class Terms:
    """The terms of a model's passes, measured at `widths` (the first is 1) and `contexts`, both ascending."""

    kinds: BlockKinds
    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    num_tokens: int | None = None
    """Size of the model's vocabulary; None if drafts choose from all of it, as the LM head has no plain rows."""
    bits: tuple[BitWidth, ...] = ()
    """Precisions of quantised drafts. Their sublayers and the rest of a pass have seconds of their own; what depends on the
    context, and frames, are those of the model's own weights, as keys and values are not quantised."""

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each group of terms; `rising` counts its last axes."""
        num_contexts, num_widths = len(self.contexts), len(self.widths)
        return {
            "rest": (num_widths, num_contexts),
            "frame": (_count(self.kinds.frame),),
            "attention": (_count(self.kinds.attention), num_contexts),
            "mlp": (_count(self.kinds.mlp),),
            "wider": (_count(self.kinds.block), num_widths - 1, num_contexts),
            "narrowed": (),
            "choice": (),
            "look": (),
            "quantised_rest": (len(self.bits),),
            "quantised_attention": (len(self.bits), _count(self.kinds.attention)),
            "quantised_mlp": (len(self.bits), _count(self.kinds.mlp)),
            "quantised_left_out": (len(self.bits),),
        }

    @property
    def rising(self) -> dict[str, int]:
        """Number of the last axes (widths, contexts) along which seconds never fall, by group."""
        rising = {"rest": 2, "attention": 1, "wider": 2}
        return {name: rising.get(name, 0) for name in self.shapes}

    @property
    def length(self) -> int:
        """Number of terms."""
        return sum(prod(shape) for shape in self.shapes.values())

    def split(self, values: Vector) -> dict[str, Vector]:
        """Return views [..., shape of the group] of `values` [..., length], by group."""
        groups, start = {}, 0
        for name, shape in self.shapes.items():
            size = prod(shape)
            groups[name] = values[..., start : start + size].reshape((*values.shape[:-1], *shape))
            start += size
        return groups

    def amounts(self, each: Pass) -> Vector:
        """Return the amount [length] of each term in a pass; linear between measured widths and contexts.

        Raises ValueError for a draft in a precision that was not measured.
        """
        amounts = np.zeros(self.length)
        terms = self.split(amounts)
        at_context = _between(self.contexts, each.context)
        if isinstance(each, DraftStep):
            self._add_rest(terms, at_context, each)
            terms["choice"] += 1
            terms["look"] += each.looks
            self._add_blocks(terms, at_context, each.skip, has_head=each.has_head)
            return amounts
        at_width = _between(self.widths, each.width)
        terms["rest"] += np.outer(at_width, at_context)
        self._add_blocks(terms, at_context, LayerSkip())
        after = _counts(self.kinds.block[each.boundary :], len(terms["wider"]))
        terms["wider"] += np.multiply.outer(after, np.outer(at_width[1:], at_context))
        terms["narrowed"] += each.boundary
        return amounts

    def _add_rest(self, terms: dict[str, Vector], at_context: Vector, step: DraftStep) -> None:
        """Add a draft step without its blocks: the embedding and the LM head, or the rows of it that the draft computes."""
        if step.skip.bits is None:
            terms["rest"][0] += at_context
            return
        index = self._index_of(step.skip.bits)
        terms["rest"][0] += self._beyond_first(at_context)
        terms["quantised_rest"][index] += 1
        terms["quantised_left_out"][index] -= self._share_left_out(step.skip.ids_below)

    def _beyond_first(self, at_context: Vector) -> Vector:
        """Return the weights of what a context adds to the first one."""
        return at_context - _between(self.contexts, self.contexts[0])

    def _index_of(self, bits: int) -> int:
        if bits not in self.bits:
            raise ValueError(f"the costs of int{bits} drafts were not measured on this device")
        return self.bits.index(bits)

    def _share_left_out(self, num_tokens: int | None) -> float:
        """Return the share of the LM head's rows that a draft from `num_tokens` tokens does not compute."""
        if num_tokens is None or self.num_tokens is None:
            return 0.0
        return 1.0 - min(num_tokens / self.num_tokens, 1.0)

    def _add_blocks(
        self, terms: dict[str, Vector], at_context: Vector, skip: LayerSkip, *, has_head: bool = False
    ) -> None:
        """Add one token through all blocks but the skipped parts, and through a head like the last block."""
        blocks = [*range(self.kinds.num_layers), *([self.kinds.num_layers] if has_head else [])]
        skip_attention, skip_mlp = frozenset(skip.skip_attention), frozenset(skip.skip_mlp)
        run = [index for index in blocks if index not in skip_attention or index not in skip_mlp]
        terms["frame"] += self._count(self.kinds.frame, run, len(terms["frame"]))
        attention = self._count(self.kinds.attention, set(run) - skip_attention, len(terms["attention"]))
        mlp = self._count(self.kinds.mlp, set(run) - skip_mlp, len(terms["mlp"]))
        if skip.bits is None:
            terms["attention"] += np.outer(attention, at_context)
            terms["mlp"] += mlp
        else:
            index = self._index_of(skip.bits)
            terms["attention"] += np.outer(attention, self._beyond_first(at_context))
            terms["quantised_attention"][index] += attention
            terms["quantised_mlp"][index] += mlp

    def _count(self, kinds: Sequence[int | None], blocks: Iterable[int], num_kinds: int) -> Vector:
        """Return the number of `blocks` with a part of each kind; a block after the last counts as the last."""
        last = self.kinds.num_layers - 1
        return _counts([kinds[min(index, last)] for index in blocks], num_kinds)


def _between(points: Sequence[int], at: float) -> Vector:
    """Return the weight of each of `points` in the value at `at`.

    Linear between neighbours, on the last line beyond the last point, constant before the first point.
    """
    shares = np.zeros(len(points))
    if at <= points[0] or len(points) == 1:
        shares[0] = 1.0
        return shares
    above = min(int(np.searchsorted(points, at)), len(points) - 1)
    share = (at - points[above - 1]) / (points[above] - points[above - 1])
    shares[above - 1], shares[above] = 1.0 - share, share
    return shares


def _counts(numbers: Iterable[int | None], num_kinds: int) -> Vector:
    """Return the count of each number below `num_kinds` in `numbers`."""
    counts = np.zeros(num_kinds)
    for number in numbers:
        if number is not None:
            counts[number] += 1.0
    return counts


def _module(block: nn.Module, part: Sublayer | None) -> nn.Module | None:
    return None if part is None else getattr(block, part.name)


def _traits(module: nn.Module | None, *others: Hashable) -> Hashable | None:
    """Return the traits that modules of one kind share, or None without a module."""
    return None if module is None else (type(module).__name__, _num_weights(module), *others)


def _num_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _numbered(keys: Sequence[Hashable | None]) -> tuple[int | None, ...]:
    """Return a number for each key, equal for equal keys, in order of first appearance."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(_present(keys)))}
    return tuple(None if key is None else numbers[key] for key in keys)


def _present(keys: Iterable[Hashable | None]) -> Iterator[Hashable]:
    return (key for key in keys if key is not None)


def _count(numbers: Iterable[int | None]) -> int:
    return 1 + max((number for number in numbers if number is not None), default=-1)
