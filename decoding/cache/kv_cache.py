"""One preallocated key-value cache: nothing is copied when a round begins or ends, and rolling back sets a length.

Every forward pass covers the positions `[start, end)`. A layer writes its keys and values there and reads `[0, end)`; what
lies behind `end` (the draft's own keys of an earlier round) is never read and is overwritten by the next pass. All layers
share the one window, also those a draft skips: they are behind for a moment, and the verification fills them in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from decoding.cache.last_position import last_position


@dataclass(slots=True)
class Window:
    """The positions the current forward pass covers. All layers of a cache, and its branch, share one.

    A pass of fixed shapes (`decoding.runners.static`) says where it writes in tensors, so that the same computation serves every
    place in the text; `slots` is None in a pass that says it in numbers.
    """

    start: int = 0
    end: int = 0
    slots: Tensor | None = None
    """[width] places to write, those of padding among them; [texts, width] in a pass of several texts."""
    last: Tensor | None = None
    """[1], or one a text: which of these is the last that is no padding."""
    last_slot: Tensor | None = None
    """[1], or [texts, 1]: the place of that one."""
    rows: slice | None = None
    """Which texts of the memory such a pass is over; None for its only one."""
    masks: tuple[Tensor, ...] = ()
    """[texts, 1, width, places] each: where the layers of each kind look in such a pass, which reads so many places."""
    extent: Tensor | None = None
    """[places], for its size: how many places such a pass reads."""

    def begin(self, slots: Tensor, last: Tensor, last_slot: Tensor, masks: tuple[Tensor, ...]) -> None:
        """A pass of fixed shapes over these places."""
        self.slots, self.last, self.last_slot, self.masks = slots, last, last_slot, masks
        self.extent = masks[0][0, 0, 0]

    def end_pass(self) -> None:
        """Passes say in numbers again where they write."""
        self.slots = self.last = self.last_slot = self.extent = None
        self.masks = ()

    def mask(self, kind: int, width: int) -> Tensor:
        """The mask of one kind of layers for all positions of the pass, or, if `width` is 1, for its last."""
        mask = self.masks[kind]
        if mask.shape[-2] == width:
            return mask
        assert self.last is not None, "it is set for the duration of a pass"
        return last_position(mask, -2, self.last)


class Slot:
    """Keys and values [texts, heads, capacity, size] of one layer, as a pass of fixed shapes reads and writes them.

    `slots` are the places to write, [width] or [texts, width]; as many are read as `extent` is long. (The size of a tensor and
    not a number: compiled code takes a number for a constant.)
    """

    def __init__(self, slots: Tensor, keys: Tensor, values: Tensor, extent: Tensor) -> None:
        self.slots, self.keys, self.values, self.extent = slots, keys, values, extent

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write those of this pass, give all."""
        for kept, states in ((self.keys, key_states), (self.values, value_states)):
            if self.slots.ndim == 1:
                kept.index_copy_(2, self.slots, states)
            else:
                kept.scatter_(2, self.slots[:, None, :, None].expand_as(states), states)
        places = self.extent.shape[0]
        return self.keys[:, :, :places], self.values[:, :, :places]


class _CacheLayer(CacheLayerMixin):
    """Keys and values of one layer, [texts, heads, capacity, head size] each, allocated at the first write.

    Sliding-window layers keep all positions too: their masks hide what is out of the window, and a rollback can bring it back.
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
        # A pass that resumes behind the prefix runs the prefix layers on the last position only: the write ends at `end`.
        start = end - key_states.shape[-2]
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.num_updates += 1
        return self.keys[:, :, :end], self.values[:, :, :end]

    def slot(self, width: int) -> Slot:
        """The layer for `width` positions of a pass of fixed shapes: all, or the last. Something must have been written before."""
        window = self._window
        slots, last_slot, extent = window.slots, window.last_slot, window.extent
        if slots is None or last_slot is None or extent is None:
            raise RuntimeError("a pass of fixed shapes has not begun")
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
    """One text's part [1, heads, capacity, head size] of a layer that serves several."""

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
    """The memory of a cache, layer by layer, for one text or for several, a row each.

    It outlives its text where passes of fixed addresses are bound to it.
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
        """The memory of an exit head on the same text, made when first asked for."""
        if self._branch is None and self._whole is not None:
            whole, row = self._whole
            self._branch = whole.branch.row(row, self.window)
        elif self._branch is None:
            self._branch = Storage(len(self.layers), self.capacity, self.window, num_rows=self.num_rows)
        return self._branch

    def row(self, index: int, window: Window | None = None) -> Storage:
        """The memory of one of the texts, with a window of its own: what is written there is written here."""
        own = Storage(0, self.capacity, window)
        own.layers = [_RowLayer(own.window, self.capacity, layer, index) for layer in self.layers]
        own._whole = self, index
        return own


class KVCache(Cache):
    """A cache for one text of at most `capacity` tokens; `length` is the number of positions that hold verified tokens.

    It lies in `storage`, which may be larger and have served other texts.
    """

    def __init__(self, num_layers: int, capacity: int, storage: Storage | None = None) -> None:
        self.storage = storage or Storage(num_layers, capacity)
        self.window = self.storage.window
        self._branch: BranchCache | None = None
        self.capacity = capacity
        self.length = 0
        self.lockstep: Callable[..., Any] | None = None
        """Where the passes of a text go that is written in step with others; see `decoding.lockstep`."""
        super().__init__(layers=list(self.storage.layers))

    @property
    def branch(self) -> BranchCache:
        """The keys and values of an exit head on the same text, made when first asked for."""
        if self._branch is None:
            self._branch = BranchCache(len(self.layers), self.capacity, self.storage.branch)
        return self._branch

    def slot(self, index: int, width: int) -> Slot:
        """Layer `index` for `width` positions of a pass of fixed shapes: all of them, or the last."""
        return self.storage.layers[index].slot(width)

    def cover(self, start: int, width: int) -> None:
        """Set the positions `[start, start + width)` that the next forward pass writes."""
        if start + width > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} positions, a pass wants position {start + width - 1}")
        self.window.start, self.window.end = start, start + width

    def roll_back(self, length: int) -> None:
        """Forget everything behind the first `length` positions, in every layer and in the branch."""
        self.length = length
        if self._branch is not None:
            self._branch.roll_back(length)

    @property
    def updates_per_layer(self) -> list[int]:
        """How often each layer has written since the cache was made: a layer that never does keeps its state elsewhere."""
        return [layer.num_updates for layer in self.layers]


class BranchCache(KVCache):
    """Keys and values of an exit head, which stands beside the stack: the same window, the same positions, its own contents.

    The head sees a position later than the stack does. `pending` holds the hidden states of the positions from `length` on
    that the stack has computed and the head has not seen yet.
    """

    def __init__(self, num_layers: int, capacity: int, storage: Storage) -> None:
        super().__init__(num_layers, capacity, storage)
        self.pending: Tensor | None = None
        """[.., positions, hidden], or None if the head has seen all."""

    @property
    def num_known(self) -> int:
        """Positions whose states the head has seen or has pending."""
        return self.length + (0 if self.pending is None else self.pending.shape[-2])

    def extend(self, states: Tensor) -> None:
        """Keep the `states` [.., positions, hidden] behind those known, for the head to see later."""
        if states.shape[-2]:
            self.pending = states if self.pending is None else torch.cat([self.pending, states], dim=-2)

    def catch_up(self, length: int) -> None:
        """The head has seen all of the first `length` positions."""
        self.length, self.pending = length, None

    def roll_back(self, length: int) -> None:
        """Forget what lies behind the first `length` positions."""
        wanted = length - self.length
        if self.pending is not None:
            self.pending = self.pending[..., :wanted, :] if wanted > 0 else None
        self.length = min(self.length, length)


def _allocate(states: Tensor, num_rows: int, capacity: int) -> Tensor:
    _, heads, _, size = states.shape
    # A pass of fixed shapes reads places that nothing was written to: hidden by its mask, but not if they are no numbers.
    with torch.inference_mode(False):  # memory that is kept may be written in any mode
        return torch.zeros((num_rows, heads, capacity, size), dtype=states.dtype, device=states.device)
