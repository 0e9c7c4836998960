"""Runs passes in a few fixed shapes, so that compiled code and CUDA graphs are reused.

A pass of `width` positions is right-padded to the next bucket. It writes its keys and values, including the
padding's, at its positions' slots, and reads a bucket of slots under a mask. Entries written by padding are after the
end of the sequence; they are masked and later overwritten. A pass's position is a tensor in fixed memory, so that one
recording serves every position in the sequence.

The prompt, and passes wider than the widest bucket, run eagerly. On a CPU passes are recorded as tapes; everything else is
the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from decoding.cache.kv_cache import KVCache, Storage
from decoding.errors import UnsupportedRunnerError
from decoding.kernels.choice import kernel_for
from decoding.runners.buckets import CPU_BUCKETS, GPU_BUCKETS, Buckets
from decoding.runners.compilation import PREPARING, CompiledBlocks, call_block, compiling, without_guards
from decoding.runners.contract import BlockCall, Outputs, Part, PassRequest, Written, judged, one_token, write_by
from decoding.runners.eager import EagerRunner
from decoding.runners.graphs import CudaGraphs, OutputsT, PassRecorder
from decoding.runners.masks import MaskKinds, Positions
from decoding.runners.shared_pass import (
    RowInputs,
    Rows,
    compute_chains,
    compute_in_window,
    compute_rows,
    split_chains,
    split_rows,
)
from decoding.runners.tape import Tapes

_Key = tuple[Any, Storage, bool, bool]
"""Shape and storage of a pass, and torch's modes."""

Shape = TypeVar("Shape", "_Shape", Rows)

CHAINS = (8, 4, 2)
"""Tokens per recording: a draft of any length is composed of these and of single passes. On a CPU a tape of several passes takes as
long as the passes one by one."""


class StaticRunner(EagerRunner):
    """Fixed-shape passes for one model on one device. Threads may run sequences in storages of their own at the same time.

    Nothing that a pass changes is shared between storages. Preparing is shared: a first pass of its shape waits for other threads'.
    `recorder` records each pass at its first run; by default CUDA graphs on a GPU, tapes of compiled blocks on a CPU.
    """

    name = "static"
    has_bit_exact_mode = True
    block_call: BlockCall
    buckets: Buckets

    def __init__(
        self,
        mask_kinds: MaskKinds,
        device: torch.device,
        *,
        compiled: bool = True,
        buckets: Buckets | None = None,
        exact_width: int | None = None,
        recorder: PassRecorder | None = None,
    ) -> None:
        super().__init__(mask_kinds, device)
        self.exact_width = exact_width
        blocks = CompiledBlocks(device) if compiled else None
        self.block_call = blocks or call_block
        self.buckets = buckets or (GPU_BUCKETS if device.type == "cuda" else CPU_BUCKETS)
        self._device = device
        self._recorder = recorder or _default_recorder(device, blocks)
        self._tapes = isinstance(self._recorder, Tapes)
        self._forms = self._in_place_of(mask_kinds)
        """Makes what fixed-shape passes get: masks, or what a kernel reads in their place."""
        self.attends_by_position = isinstance(self._forms, Positions)
        self.reads_all_slots = self._forms.reads_all
        self.records = self._recorder is not None
        self._storages: list[Storage] = []
        """All storages that can be handed out again, in the order in which they were made."""
        self._in_use: set[Storage] = set()
        self._protected: set[Storage] = set()
        """Storages that outlive the current context of `temporary_memory`, although they may be too small for it."""
        # Sequences in different storages may run in different threads, so each storage has inputs of its own.
        self._inputs = WeakKeyDictionary[Storage, dict[int, _Buffers]]()
        # Recordings live as long as their part and are bound to the storage that they read.
        self._prepared: WeakKeyDictionary[Part, dict[_Key, Callable[[], Any]]] = WeakKeyDictionary()
        self._row_inputs = WeakKeyDictionary[Storage, dict[Rows, RowInputs]]()

    def _in_place_of(self, masks: MaskKinds) -> MaskKinds:
        # Any other recorder stands for a GPU, of which this kernel would give the wrong shapes.
        is_cpu = self._recorder is None or self._tapes
        attends = is_cpu and masks.attends_plainly and masks.additive is not None
        if attends and kernel_for("attention", self._device, masks.additive).kernel is not None:
            return Positions(masks.windows, masks.additive)
        return masks

    def new_cache(self, num_layers: int, capacity: int, num_rows: int = 1) -> KVCache:
        """Return an empty cache with room for padding.

        The storage of earlier sequences is reused if it is large enough.
        """
        # One slot more than any pass reads: the compiler would make code of its own for passes that read all of them.
        num_slots = self.buckets.capacity(capacity) + (not self.reads_all_slots)
        with PREPARING:
            storage = self._take(num_layers, num_slots, num_rows)
            self._in_use.add(storage)
        cache = KVCache(num_layers, capacity, storage)
        weakref.finalize(cache, self._in_use.discard, storage).atexit = False
        return cache

    def _take(self, num_layers: int, num_slots: int, num_rows: int) -> Storage:
        """Return the oldest free storage that is large enough, or a new one.

        The oldest, because passes are recorded for one storage: sequences that follow one another must get the same.
        """
        alike = [each for each in self._storages if (len(each.layers), each.num_rows) == (num_layers, num_rows)]
        free = [each for each in alike if each not in self._in_use]
        for storage in free:
            if storage.capacity >= num_slots:
                return storage
        # The free storages are too small. The new one replaces them, so that only few sizes exist.
        for small in free:
            if small not in self._protected:
                self._forget(small)
        self._storages.append(Storage(num_layers, num_slots, num_rows=num_rows))
        return self._storages[-1]

    @contextmanager
    def temporary_memory(self) -> Iterator[None]:
        """Forget the storages made in this context at its end, with their recordings."""
        outer, self._protected = self._protected, set(self._storages)
        try:
            yield
        finally:
            with PREPARING:
                for storage in [each for each in self._storages if each not in self._protected]:
                    self._forget(storage)
                self._protected = outer

    def drop_recordings(self) -> None:
        """Forget all passes, and the storages that they were prepared for."""
        with PREPARING:
            for storage in list(self._storages):
                self._forget(storage)
            self._prepared.clear()

    def _forget(self, storage: Storage) -> None:
        """Drop a storage and the recordings that are bound to it."""
        self._storages.remove(storage)
        for known in self._prepared.values():
            for key in [key for key in known if key[1] is storage]:
                del known[key]

    def run(
        self,
        part: Part,
        token_ids: Tensor,
        cache: KVCache,
        start: int,
        *,
        last_only: bool = False,
        states: Tensor | None = None,
        looks: bool = False,
    ) -> Outputs:
        """Run a pass in a fixed shape. No later pass changes the outputs."""
        width = token_ids.shape[1]
        exact_width = self.exact_width if part.is_whole else None
        if start == 0 or width > (exact_width or self.buckets.widest):
            return super().run(part, token_ids, cache, start, last_only=last_only, states=states)
        cache.cover(start, width)
        looks = looks and self._recorder is not None
        if exact_width:
            # One shape for all passes over a sequence: kernels are picked by shape, including the number of rows whose
            # logits are computed.
            shape = _Shape(exact_width, self.buckets.capacity(cache.capacity), looks=looks, only_best=cache.only_best)
        else:
            bucket = self.buckets.width(width)
            reach = self._reach(cache.storage, start + bucket)
            shape = _Shape(
                bucket,
                reach,
                last_only and bucket > 1,
                states is not None,
                looks=looks,
                only_best=cache.only_best,
            )
        buffers = self._buffers(cache, shape.width)
        buffers.fill(token_ids, start, states)
        outputs = self._prepared_pass(part, cache, shape, self._compute)
        kept = None if outputs.states is None else outputs.states[..., :width, :].clone()
        return outputs.of_row(0, 1 if shape.last_only else width, kept, last_only=last_only)

    def write_greedily(self, part: Part, token_ids: Tensor, cache: KVCache, start: int, num_tokens: int) -> Written:
        """Draft in as few recordings as possible."""

        def piece(token_ids: Tensor, index: int) -> Written:
            return self._piece(part, token_ids, cache, start + index, num_tokens - index)

        return write_by(piece, token_ids, num_tokens)

    def _piece(self, part: Part, token_ids: Tensor, cache: KVCache, start: int, num_tokens: int) -> Written:
        """Draft as many of the tokens as one recording covers."""
        count = self._longest_chain(num_tokens)
        if count == 1 or start == 0 or (part.is_whole and self.exact_width is not None):
            return one_token(self.run(part, token_ids, cache, start, last_only=True))
        cache.cover(start, count)
        self._buffers(cache, 1).fill(token_ids, start, None)
        shape = _Shape(1, self._reach(cache.storage, start + count), num_tokens=count)
        return self._prepared_pass(part, cache, shape, self._compute_chain)

    def _longest_chain(self, num_tokens: int) -> int:
        """Return the number of tokens, at most `num_tokens`, that one recording drafts."""
        return 1 if self._tapes else next((count for count in CHAINS if count <= num_tokens), 1)

    def run_shared_pass(self, part: Part, passes: Mapping[int, PassRequest], memory: Storage) -> dict[int, Outputs]:
        """Run a shared pass in a fixed shape, if there is one of this width for all rows."""
        if not self.buckets.fits(max(each.width for each in passes.values()), memory.num_rows):
            rows = self._reaching(Rows.of(passes, min_rows=min(2, memory.num_rows)), memory)
            cache = KVCache(len(memory.layers), memory.capacity, memory)
            with compiling(self.block_call):  # it is not recorded, but its blocks are compiled code too
                outputs = compute_rows(part, RowInputs.of(passes, rows), cache, self._forms, rows)
            return split_rows(outputs, passes, rows)
        rows, cache = self._begin_rows(passes, memory, 1)
        return split_rows(self._prepared_pass(part, cache, rows, self._compute_rows), passes, rows)

    def write_together(
        self, part: Part, passes: Mapping[int, PassRequest], memory: Storage, num_tokens: int
    ) -> dict[int, Written]:
        """Draft as many tokens as one recording covers."""
        count = self._longest_chain(num_tokens) if self.buckets.fits(1, memory.num_rows) else 1
        if count == 1:  # a shared pass of the same shape may be prepared already
            outputs = self.run_shared_pass(part, passes, memory)
            return {row: one_token(each) for row, each in outputs.items()}
        rows, cache = self._begin_rows(passes, memory, count)
        return split_chains(self._prepared_pass(part, cache, rows, self._compute_chains), passes, rows)

    def _begin_rows(self, passes: Mapping[int, PassRequest], memory: Storage, num_tokens: int) -> tuple[Rows, KVCache]:
        """Copy the inputs of a shared pass into its memory; return its rows and the cache of all sequences."""
        if self.exact_width is not None:
            raise UnsupportedRunnerError("a bit-exact pass covers one sequence only")
        # The compiler treats a size of 1 as a constant: a batch's last sequence would trigger a compilation.
        min_rows = memory.num_rows if self.buckets.all_rows else min(2, memory.num_rows)
        rows = Rows.of(passes, min_rows=min_rows, num_tokens=num_tokens)
        width = self.buckets.width(rows.width)
        furthest = max(each.start for each in passes.values()) + width + num_tokens - 1
        rows = self._reaching(replace(rows, width=width, num_slots=furthest, fixed_shape=True), memory)
        given = RowInputs.of(passes, rows)
        known = self._row_inputs.setdefault(memory, {})
        if rows.inputs not in known:
            known[rows.inputs] = given.copied()
        else:
            known[rows.inputs].fill(given)
        return rows, KVCache(len(memory.layers), memory.capacity, memory)

    def _reaching(self, rows: Rows, memory: Storage) -> Rows:
        """Return `rows` with their slots rounded up: some attention kernels would need code of their own for other numbers."""
        return replace(rows, num_slots=min(self._reach(memory, rows.num_slots), memory.capacity))

    def _compute_rows(self, part: Part, cache: KVCache, rows: Rows) -> Outputs:
        return compute_rows(part, self._row_inputs[cache.storage][rows.inputs], cache, self._forms, rows)

    def _compute_chains(self, part: Part, cache: KVCache, rows: Rows) -> Written:
        return compute_chains(part, self._row_inputs[cache.storage][rows.inputs], cache, self._forms, rows)

    def _reach(self, storage: Storage, end: int) -> int:
        """Return how many slots a pass is given to read the first `end`: all of them where their number is data."""
        return storage.capacity if self.reads_all_slots else self.buckets.reach(end)

    def _buffers(self, cache: KVCache, width: int) -> _Buffers:
        known = self._inputs.setdefault(cache.storage, {})
        if width not in known:
            with torch.inference_mode(False):  # filled in any mode
                known[width] = _Buffers(width, self._device)
        return known[width]

    def _prepared_pass(
        self, part: Part, cache: KVCache, shape: Shape, compute: Callable[[Part, KVCache, Shape], OutputsT]
    ) -> OutputsT:
        """Run a pass of this shape, reusing its preparation if there is one.

        The first pass of a shape is compiled where needed and recorded.
        """
        key = (shape, cache.storage, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if (prepared := self._prepared.get(part, {}).get(key)) is not None:
            return cast(OutputsT, prepared())
        run = _bound(part, cache.storage, shape, compute)
        with compiling(self.block_call):
            known = self._prepared.setdefault(part, {})
            if self._recorder is not None:
                outputs, known[key] = self._recorder.record(run)
                return outputs
            outputs = run()
            known[key] = run if self.block_call is call_block else without_guards(run)
            return outputs

    def _compute(self, part: Part, cache: KVCache, shape: _Shape) -> Outputs:
        buffers = self._buffers(cache, shape.width)
        states = buffers.states if shape.resumes else None
        token_ids, last = buffers.token_ids, buffers.last
        outputs = self._compute_at(part, cache, shape, token_ids, buffers.slots(), last, states)
        if self._recorder is None:
            return outputs
        # Recorded with the pass, this costs the host nothing.
        drafted = part.verifies and shape.width > 1 and not shape.last_only
        return judged(outputs, token_ids, last, drafted=drafted, looks=shape.looks)

    def _compute_chain(self, part: Part, cache: KVCache, shape: _Shape) -> Written:
        buffers = self._buffers(cache, 1)
        slots = buffers.slots()

        def step(token_ids: Tensor, index: int) -> Written:
            outputs = self._compute_at(part, cache, shape, token_ids, slots + index, buffers.last)
            return one_token(Outputs(outputs.logits[0], outputs.states))

        return write_by(step, buffers.token_ids, shape.num_tokens)

    def _compute_at(
        self,
        part: Part,
        cache: KVCache,
        shape: _Shape,
        token_ids: Tensor,
        slots: Tensor,
        last: Tensor,
        states: Tensor | None = None,
    ) -> Outputs:
        last_slot, masks = slots.index_select(0, last), self._forms.masks(slots, shape.num_slots)
        positions = torch.minimum(slots, last_slot)  # padding has the last token's position
        kept = last if shape.last_only else 0
        return compute_in_window(
            part,
            cache,
            token_ids,
            slots,
            last,
            last_slot,
            positions[None],
            masks,
            kept,
            states,
            fixed_shape=True,
        )


def _default_recorder(device: torch.device, blocks: CompiledBlocks | None) -> PassRecorder | None:
    if device.type == "cuda":
        return CudaGraphs(device)
    return Tapes(blocks) if blocks else None  # a tape of uncompiled blocks is long, and saves little


def _bound(
    part: Part, storage: Storage, shape: Shape, compute: Callable[[Part, KVCache, Shape], OutputsT]
) -> Callable[[], OutputsT]:
    """Return the pass bound to its storage, without keeping its part or any sequence alive."""
    whole = KVCache(len(storage.layers), storage.capacity, storage)
    whole.only_best = isinstance(shape, _Shape) and shape.only_best
    weak = weakref.ref(part)

    def run() -> OutputsT:
        alive = weak()
        assert alive is not None, "recordings are dropped with their part"
        return compute(alive, whole, shape)

    return run


@dataclass(frozen=True)
class _Shape:
    """The properties that distinguish the passes of one part in one storage."""

    width: int
    num_slots: int
    last_only: bool = False
    resumes: bool = False
    num_tokens: int = 1
    """Number of tokens that the pass generates, one position each; 1 in a pass that returns logits."""
    looks: bool = False
    """True if the pass computes the confidence of its logits."""
    only_best: bool = False
    """See `KVCache.only_best`."""


class _Buffers:
    """The input memory of the passes of one width."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.token_ids = torch.zeros((1, width), dtype=torch.long, device=device)
        self.last = torch.zeros(1, dtype=torch.long, device=device)
        self._width = 1
        """Number of positions without padding in the latest pass."""
        self.states: Tensor | None = None
        self._start = torch.zeros(1, dtype=torch.long, device=device)
        self._steps = torch.arange(width, device=device)

    def fill(self, token_ids: Tensor, start: int, states: Tensor | None) -> None:
        """Copy the inputs of a pass; padding keeps the values of earlier passes."""
        width = token_ids.shape[1]
        self.token_ids[:, :width] = token_ids
        self._start.fill_(start)
        if width != self._width:  # a launch saved, mostly
            self._width = width
            self.last.fill_(width - 1)
        if states is not None:
            if self.states is None:
                with torch.inference_mode(False):
                    self.states = states.new_zeros((*states.shape[:-2], self._steps.shape[0], states.shape[-1]))
            self.states[..., : states.shape[-2], :] = states

    def slots(self) -> Tensor:
        """Return the slots [width] that the pass writes."""
        return self._start + self._steps
