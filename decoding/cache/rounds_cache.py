"""A read-only cache for running many rounds of several sequences in one pass, or in a few."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from decoding.cache.kv_cache import KVCache

LEAST_KEPT, LEAST_IN_A_PASS = 2**26, 2**24
"""Bytes that even the smallest model may use for what is kept, and for what a pass gathers or returns."""


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes that known keys, values and states may occupy beside the model."""

    kept: int = 2 * 2**30
    """Up to this size the keys and values of all rounds are kept: every round has a copy of its context."""
    gathered: int = 2**30
    """Beyond it, a pass gathers the rounds of one layer at a time, and covers as many rounds as fit in this size."""
    returned: int = 2**28
    """Bytes that a pass may return: logits of a large vocabulary are larger than all else."""

    @classmethod
    def beside(cls, weight_bytes: int) -> MemoryLimits:
        """Return limits for a model of this size: an eighth of its weights for what is kept, a sixteenth in a pass.

        At least 64 and 16 MiB, at most the defaults. Known contexts would otherwise take several times the memory of a small model.
        Attention copies what a pass gathers, so that it is there twice.
        """
        kept, in_a_pass = max(LEAST_KEPT, weight_bytes // 8), max(LEAST_IN_A_PASS, weight_bytes // 16)
        return cls(min(cls.kept, kept), min(cls.gathered, in_a_pass), min(cls.returned, in_a_pass))


_Known = tuple[Tensor, Tensor]
"""Keys and values of one layer, [positions, heads, size] each: all sequences, one after another."""


class _RoundsLayer(CacheLayerMixin):
    """Keys and values of one layer, [rounds, heads, context + depth, size] each, as `rows` returns them for each pass.

    Every pass writes the last `depth` positions.
    """

    is_croppable = False
    is_sliding = False

    def __init__(self, rows: Callable[[], tuple[Tensor, Tensor]], context: int, depth: int) -> None:
        super().__init__()
        self._rows, self._context, self._depth = rows, context, depth
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("the layer is constructed with its contents")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._rows()
        keys[:, :, self._context :] = key_states
        values[:, :, self._context :] = value_states
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._context + query_length, 0

    def get_seq_length(self) -> int:
        return self._context

    def get_max_length(self) -> int:
        return self._context + self._depth


def _gathered(known: _Known, index: Tensor, num_rounds: int) -> tuple[Tensor, Tensor]:
    """Gather keys and values [rounds, heads, context + depth, size] of one layer.

    `index` [rounds x (context + depth)] is the known position that each slot holds.
    """
    index = index.to(known[0].device)
    keys, values = (each.index_select(0, index).unflatten(0, (num_rounds, -1)).transpose(1, 2) for each in known)
    return keys, values


def _same(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return keys, values


class RoundsChunk(Cache):
    """Rounds that share a pass, one row each.

    Row r holds the target's keys and values of positions `[0, start_r)` of a sequence, right-aligned in a context as
    long as the longest row, followed by `depth` positions that each pass writes. Passes do not see the writes of
    earlier passes, so one cache serves any number of drafts.
    """

    def __init__(
        self,
        known: Sequence[_Known],
        offsets: Sequence[int],
        starts: Sequence[int],
        depth: int,
        rows: slice,
        *,
        keeps_rows: bool,
    ) -> None:
        self.rows = rows
        """Rows of the `RoundsCache` that this chunk covers."""
        self._starts, self._depth = tuple(starts[rows]), depth
        self._context = max(self._starts)
        index = self._known_positions(offsets[rows], known[0][0].device)
        rows_of = [partial(_gathered, each, index, len(self._starts)) for each in known]
        if keeps_rows:
            rows_of = [partial(_same, *map(Tensor.contiguous, gather())) for gather in rows_of]
        super().__init__(layers=[_RoundsLayer(gather, self._context, depth) for gather in rows_of])

    def _known_positions(self, offsets: Sequence[int], device: torch.device) -> Tensor:
        """Return which known position each slot holds, [rounds x (context + depth)].

        Slots of the left padding, which the mask hides, and slots that a pass writes hold the sequence's first position.
        """
        first = torch.tensor(offsets, device=device)[:, None]
        starts = torch.tensor(self._starts, device=device)[:, None]
        positions = torch.arange(self._context + self._depth, device=device) - self._context + starts
        return (first + positions.where((positions >= 0) & (positions < starts), 0)).flatten()

    def attention_mask(self, device: torch.device) -> Tensor:
        """Return the mask [rounds, context + depth]: 0 at the left padding of shorter contexts."""
        indices = torch.arange(self._context + self._depth, device=device)
        first = torch.tensor([self._context - start for start in self._starts], device=device)
        return (indices >= first[:, None]).long()

    def positions(self, device: torch.device) -> Tensor:
        """Return the sequence positions [rounds, depth] of the drafted tokens."""
        return torch.tensor(self._starts, device=device)[:, None] + torch.arange(self._depth, device=device)


class RoundsCache:
    """The contexts of many rounds, for drafting known tokens at once.

    `sequences` are caches, each with the positions at which rounds start; the rows are in that order. A cache is copied
    and not needed again. A copy of the context for each round is kept if all of them fit in `limits.kept`.
    Otherwise the sequences are kept once, and every pass gathers the rounds layer by layer, in chunks of at most
    `limits.gathered` per layer. `output_bytes` are the bytes that a pass returns for each round, at most `limits.returned` for a
    chunk. Raises ValueError without a round, without a known position, or for rounds without tokens.
    """

    def __init__(
        self,
        sequences: Iterable[tuple[KVCache, Sequence[int]]],
        depth: int,
        limits: MemoryLimits = MemoryLimits(),
        *,
        output_bytes: int = 0,
    ) -> None:
        known, offsets, starts = _joined(sequences)
        if not starts or depth < 1:
            raise ValueError(f"at least one round of at least one token is needed, got {len(starts)} of {depth}")
        if max(starts) < 1:
            raise ValueError("a round starts after at least one known token")
        self.starts = tuple(starts)
        self.depth = depth
        row_bytes = [(max(starts) + depth) * sum(each[0].nbytes for each in layer) for layer in known]
        keeps_rows = len(starts) * sum(row_bytes) <= limits.kept
        size = len(starts) if keeps_rows else max(1, limits.gathered // max(row_bytes))
        if output_bytes:
            size = min(size, max(1, limits.returned // output_bytes))
        self.chunks = tuple(
            RoundsChunk(known, offsets, starts, depth, slice(first, first + size), keeps_rows=keeps_rows)
            for first in range(0, len(starts), size)
        )
        """The rounds, as they share passes."""


def _joined(sequences: Iterable[tuple[KVCache, Sequence[int]]]) -> tuple[list[_Known], list[int], list[int]]:
    """Return each layer's known keys and values, and of each round the offset of its sequence therein and its start."""
    parts: list[list[_Known]] = []
    offsets, starts, total = list[int](), list[int](), 0
    for cache, starts_of_sequence in sequences:
        length = max(starts_of_sequence, default=0)
        parts.append([(_known(layer.keys, length), _known(layer.values, length)) for layer in cache.layers])
        offsets += [total] * len(starts_of_sequence)
        starts += starts_of_sequence
        total += length
        del cache  # before the next one is made
    layers = []
    while parts and parts[0]:
        # The parts of a layer are dropped as soon as they are joined.
        keys, values = zip(*(layers_of_sequence.pop(0) for layers_of_sequence in parts), strict=True)
        layers.append((torch.cat(keys), torch.cat(values)))
    return layers, offsets, starts


def _known(states: Tensor, length: int) -> Tensor:
    """Return a copy [length, heads, size] of the first positions of `states` [1, heads, capacity, size]."""
    return states[0, :, :length].transpose(0, 1).clone(memory_format=torch.contiguous_format)
