"""A preallocated key-value cache: rounds copy nothing, and rolling back sets a length.

Every forward pass covers the positions `[start, end)`. A layer writes its keys and values there and reads `[0, end)`;
entries after `end` (the draft's own keys of an earlier round) are never read and are overwritten by the next pass.
All layers share one window, including layers that a draft skips: these lag until the verification fills them in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

MOST_PENDING_PIECES = 64
"""Pieces in which pending states are kept before they are joined."""


class Company(Protocol):
    """The other sequences of a batch: one sequence's passes and reads wait until they can be shared.

    `decoding.lockstep` implements it; parts, requests and outputs are defined in `decoding.runners.contract`.
    """

    @property
    def tokens(self) -> Any:
        """The sequence's `decoding.token_memory.TokenMemory`, which the batch shares."""

    def run(self, part: Any, request: Any) -> Any:
        """Run a pass; see `EagerRunner.run`."""

    def write(self, part: Any, request: Any, num_tokens: int) -> Any:
        """Draft at least one and at most `num_tokens` greedy tokens; see `EagerRunner.write_together`."""

    def read(self, values: Tensor) -> list[Any]:
        """Copy `values` [n] to the host."""


@dataclass(slots=True)
class Window:
    """The positions that the current pass covers, shared by a cache's layers and its branch.

    A fixed-shape pass (`decoding.runners.static`) gives its positions as tensors, so that one recording serves every
    position in the sequence. In any other pass `slots` is None and the positions are plain numbers.
    """

    start: int = 0
    end: int = 0
    slots: Tensor | None = None
    """Cache slots to write, padding included: [width], or [batch, width] in a shared pass."""
    last: Tensor | None = None
    """Index of the last position that is not padding: [1], or one per sequence."""
    last_slot: Tensor | None = None
    """Slot of that last position: [1], or [batch, 1]."""
    rows: slice | None = None
    """Rows of the storage that a shared pass covers; None for the only row."""
    masks: tuple[Tensor, ...] = ()
    """One mask [batch, 1, width, num_slots] per kind of layer, where `num_slots` is the number of slots that the pass
    reads; or what the CPU kernel gets in their place (see `decoding.runners.masks.Positions`).
    """
    extent: Tensor | None = None
    """A tensor [num_slots] whose size is the number of slots that a fixed-shape pass reads; None for all."""
    formed: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    """Masks derived from `masks` in this pass, by kind, width and repeats: made for the first layer, used by all."""

    def begin(self, slots: Tensor, last: Tensor, last_slot: Tensor, masks: tuple[Tensor, ...]) -> None:
        self.slots, self.last, self.last_slot, self.masks = slots, last, last_slot, masks
        self.extent = None if _are_positions(masks[0]) else masks[0][0, 0, 0]
        self.formed.clear()

    def end_pass(self) -> None:
        """End the fixed-shape pass: later passes give their positions as numbers."""
        self.slots = self.last = self.last_slot = self.extent = None
        self.masks = ()
        self.formed.clear()

    def mask(self, kind: int, width: int, repeats: int = 1) -> Tensor:
        """Return one kind's mask for all positions of the pass, or for the last if `width` is 1.

        Its rows are repeated for `repeats` query heads that are stacked as positions: [batch, 1, repeats * width, num_slots].
        """
        key = kind, width, repeats
        if key not in self.formed:
            self.formed[key] = self._form(*key)
        return self.formed[key]

    def _form(self, kind: int, width: int, repeats: int) -> Tensor:
        mask = self.masks[kind]
        assert self.last is not None, "within a fixed-shape pass"
        if _are_positions(mask):
            return mask if mask.shape[-1] == width else mask.take_along_dim(self.last.view(-1, 1, 1, 1), -1)
        if mask.shape[-2] != width:
            mask = last_position(mask, -2, self.last)
        return mask if repeats == 1 else mask.repeat(1, 1, repeats, 1)


class Slot:
    """One layer's keys and values, as a fixed-shape pass reads and writes them.

    `keys` and `values` are [batch, heads, capacity, size]. `slots` are the indices to write, [width] or [batch,
    width]. The size of `extent` is the number of slots to read; it is a tensor because compiled code treats a plain
    number as a constant. None stands for all slots.
    """

    def __init__(self, slots: Tensor, keys: Tensor, values: Tensor, extent: Tensor | None) -> None:
        self.slots, self.keys, self.values, self.extent = slots, keys, values, extent

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write this pass's keys and values; return all that the pass reads."""
        for kept, states in ((self.keys, key_states), (self.values, value_states)):
            if self.slots.ndim == 1:
                kept.index_copy_(2, self.slots, states)
            else:
                # Not `scatter_`, for which the compiler copies the whole storage and back.
                rows, heads = (torch.arange(size, device=kept.device) for size in states.shape[:2])
                kept.index_put_((rows[:, None, None], heads[:, None], self.slots[:, None]), states)
        if self.extent is None:
            return self.keys, self.values
        num_slots = self.extent.shape[0]
        return self.keys[:, :, :num_slots], self.values[:, :, :num_slots]


class _CacheLayer(CacheLayerMixin):
    """Keys and values [batch, heads, capacity, head size] of one layer, allocated at the first write.

    Sliding-window layers keep all positions too: their masks hide positions outside the window, which a rollback can
    bring back.
    """

    is_croppable = True
    is_sliding = False

    def __init__(self, window: Window, capacity: int, num_rows: int = 1) -> None:
        super().__init__()
        self._window = window
        self._capacity = capacity
        self._num_rows = num_rows
        self.num_updates = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = _allocate(key_states, self._num_rows, self._capacity)
        self.values = _allocate(value_states, self._num_rows, self._capacity)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self._window.end
        # A pass that resumes after the shared prefix runs the prefix layers on the last position only: the write ends at `end`.
        start = end - key_states.shape[-2]
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.num_updates += 1
        return self.keys[:, :, :end], self.values[:, :, :end]

    def slot(self, width: int) -> Slot:
        """Return the layer for `width` positions of a fixed-shape pass: all of them, or the last.

        The layer must have been written before.
        """
        window = self._window
        slots, last_slot, extent = window.slots, window.last_slot, window.extent
        assert slots is not None, "within a fixed-shape pass"
        assert last_slot is not None, "within a fixed-shape pass"
        if width != slots.shape[-1]:
            slots = last_slot
        if window.rows is None:
            return Slot(slots, self.keys, self.values, extent)
        return Slot(slots, self.keys[window.rows], self.values[window.rows], extent)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._window.start + query_length, 0

    def get_seq_length(self) -> int:
        return self._window.start

    def get_max_length(self) -> int:
        return self._capacity


class _RowLayer(_CacheLayer):
    """One row [1, heads, capacity, head size] of a layer that several sequences share."""

    def __init__(self, window: Window, capacity: int, shared: _CacheLayer, row: int) -> None:
        super().__init__(window, capacity)
        self._shared, self._row = shared, row

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if not self._shared.is_initialized:
            self._shared.lazy_initialization(key_states, value_states)
        own = slice(self._row, self._row + 1)
        self.keys, self.values = self._shared.keys[own], self._shared.values[own]
        self.is_initialized = True


class Storage:
    """The memory of a cache, layer by layer, with one row per sequence.

    It outlives its sequence where fixed-address passes are bound to it.
    """

    def __init__(self, num_layers: int, capacity: int, window: Window | None = None, *, num_rows: int = 1) -> None:
        self.window = window or Window()
        self.capacity = capacity
        self.num_rows = num_rows
        self.layers = [_CacheLayer(self.window, capacity, num_rows) for _ in range(num_layers)]
        self._branch: Storage | None = None
        self._whole: tuple[Storage, int] | None = None

    @property
    def branch(self) -> Storage:
        """The memory of a trained head for the same sequences, made on first use."""
        if self._branch is None and self._whole is not None:
            whole, row = self._whole
            self._branch = whole.branch.row(row, self.window)
        elif self._branch is None:
            self._branch = Storage(len(self.layers), self.capacity, self.window, num_rows=self.num_rows)
        return self._branch

    def row(self, index: int, window: Window | None = None) -> Storage:
        """Return one row's memory with its own window; both share their contents."""
        own = Storage(0, self.capacity, window)
        own.layers = [_RowLayer(own.window, self.capacity, layer, index) for layer in self.layers]
        own._whole = self, index
        return own


class KVCache(Cache):
    """A cache for one sequence of at most `capacity` tokens.

    `length` is the number of positions that hold verified tokens. `storage` may be larger than needed and hold
    remains of earlier sequences.
    """

    def __init__(self, num_layers: int, capacity: int, storage: Storage | None = None) -> None:
        self.storage = storage or Storage(num_layers, capacity)
        self.window = self.storage.window
        self._branch: BranchCache | None = None
        self.capacity = capacity
        self.length = 0
        self.only_best = False
        """True if of the logits of a pass only the largest need to be the model's: nothing but the most likely token is read."""
        self.company: Company | None = None
        """Receives the passes of a sequence that is decoded in lockstep."""
        super().__init__(layers=list(self.storage.layers))

    @property
    def branch(self) -> BranchCache:
        """The keys and values of a trained head for the same sequence, made on first use."""
        if self._branch is None:
            self._branch = BranchCache(len(self.layers), self.capacity, self.storage.branch)
        return self._branch

    @property
    def has_branch(self) -> bool:
        """True if a trained head has keys and values for this sequence."""
        return self._branch is not None

    def slot(self, index: int, width: int) -> Slot:
        """Return layer `index` for `width` positions of a fixed-shape pass: all of them, or the last."""
        return self.storage.layers[index].slot(width)

    def cover(self, start: int, width: int) -> None:
        """Set the positions `[start, start + width)` that the next forward pass writes.

        Raises `ValueError` if they exceed the capacity.
        """
        if start + width > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} positions, but the pass needs position {start + width - 1}"
            )
        self.window.start, self.window.end = start, start + width

    def roll_back(self, length: int) -> None:
        """Forget everything after the first `length` positions, in every layer and in the branch."""
        self.length = length
        if self._branch is not None:
            self._branch.roll_back(length)

    def pretend(self, length: int, pending: Tensor | None = None) -> None:
        """Take the first `length` positions as read, in the branch as well, whatever the memory holds.

        The branch still lacks the last ones, whose states `pending` [.., positions, hidden] are, if there are any. Passes at any
        position can thus be rehearsed (`decoding.rehearsal`); what they compute means nothing.
        """
        self.length = length
        self.branch.catch_up(length if pending is None else length - pending.shape[-2])
        if pending is not None:
            self.branch.extend(pending)

    def pretend_pending(self, num_positions: int) -> bool:
        """Take the branch as lacking the last `num_positions`; return False if its drafts leave nothing pending."""
        branch = self.branch
        if branch.pending is None:
            return False
        branch.length = self.length - num_positions
        branch.pending = branch.pending[..., -1:, :].repeat_interleave(num_positions, dim=-2)
        return True

    @property
    def updates_per_layer(self) -> list[int]:
        """Number of writes per layer since the cache was made.

        A layer without writes keeps its state elsewhere.
        """
        return [layer.num_updates for layer in self.layers]


class BranchCache(KVCache):
    """Keys and values of an exit head, at the positions of the stack.

    The head shares the stack's window and sees a position later than the stack does. `pending` holds the hidden
    states of positions from `length` on that the stack has computed and the head has not yet processed.
    """

    def __init__(self, num_layers: int, capacity: int, storage: Storage) -> None:
        super().__init__(num_layers, capacity, storage)
        self._pending: list[Tensor] = []
        self.has_unread_prompt = False
        """True if the states of the prompt are pending: the head has not been needed yet."""

    @property
    def pending(self) -> Tensor | None:
        """[.., positions, hidden], or None if the head has processed every position."""
        if len(self._pending) > 1:
            self._pending = [torch.cat(self._pending, dim=-2)]
        return self._pending[0] if self._pending else None

    @pending.setter
    def pending(self, states: Tensor | None) -> None:
        self._pending = [] if states is None else [states]

    @property
    def num_pending(self) -> int:
        return sum(states.shape[-2] for states in self._pending)

    @property
    def num_known(self) -> int:
        """Number of positions whose states the head has processed or has pending."""
        return self.length + self.num_pending

    def extend(self, states: Tensor) -> None:
        """Append `states` [.., positions, hidden] to the pending states, for the head to process later."""
        if states.shape[-2]:
            self._pending.append(states)
        # Many rounds may follow without a draft: joined each time, their states would be copied again and again.
        if len(self._pending) > MOST_PENDING_PIECES:
            self.pending = self.pending

    def catch_up(self, length: int) -> None:
        """Record that the head has processed all of the first `length` positions."""
        self.length, self.pending = length, None

    def roll_back(self, length: int) -> None:
        """Forget the states after the first `length` positions."""
        wanted = length - self.length
        if self.num_pending > max(wanted, 0):
            assert self.pending is not None, "some are pending"
            self.pending = self.pending[..., :wanted, :] if wanted > 0 else None
        self.length = min(self.length, length)


def _are_positions(mask: Tensor) -> bool:
    """Return True for positions [batch, 1, 1, width], which travel in place of a mask."""
    return mask.dtype == torch.int64


def _allocate(states: Tensor, num_rows: int, capacity: int) -> Tensor:
    _, heads, _, size = states.shape
    # A fixed-shape pass reads slots that were never written. The mask hides them, but could not hide NaN.
    with torch.inference_mode(False):  # memory that outlives a pass must be writable in any mode
        return torch.zeros((num_rows, heads, capacity, size), dtype=states.dtype, device=states.device)


def last_position(values: Tensor, dim: int, last: Tensor | None) -> Tensor:
    """Return the last position [.., 1, ..] of `values`, whose positions run along `dim` (negative).

    `last` is its index: [1] for all sequences, [batch] per sequence, or None for the end. The batch dimension is the
    one before `dim`, or, if that has a single entry (the heads of a mask), the one before it.
    """
    if last is None:
        return values.narrow(dim, values.shape[dim] - 1, 1)
    if last.shape[0] == 1:
        return values.index_select(dim, last)
    return values.take_along_dim(_spread(last, values, dim), dim)


def with_last(values: Tensor, last_values: Tensor, dim: int, last: Tensor) -> Tensor:
    """Return `values` with `last_values` [.., 1, ..] at the last position; see `last_position`."""
    if last.shape[0] == 1:
        return values.index_copy(values.ndim + dim, last, last_values)
    return values.scatter(dim, _spread(last, values, dim).expand_as(last_values), last_values)


def _spread(last: Tensor, values: Tensor, dim: int) -> Tensor:
    """Reshape `last` [batch] to the dimensions of `values`: batch size in the batch dimension, else 1."""
    batch_dim = dim - 1 if values.shape[dim - 1] == last.shape[0] else dim - 2
    shape = [1] * values.ndim
    shape[batch_dim] = last.shape[0]
    return last.view(shape)
