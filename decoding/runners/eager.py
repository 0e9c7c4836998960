"""The plain runner: each pass in the shape it has. Other runners extend it, and fall back on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from decoding.cache.kv_cache import KVCache, Storage
from decoding.errors import UnsupportedRunnerError
from decoding.runners.buckets import Buckets
from decoding.runners.contract import BlockCall, Inputs, Outputs, Part, PassRequest, Written, one_token, write_by
from decoding.runners.masks import MaskKinds
from decoding.runners.shared_pass import (
    RowInputs,
    Rows,
    compute_chains,
    compute_rows,
    split_chains,
    split_rows,
)

MAX_PASS_WIDTH = 1024
"""Maximum number of prompt positions per pass: enough to saturate any device, with modest activation memory."""


class EagerRunner:
    """Executes the passes of one model's parts: no preparation, no padding, any shape.

    Long prompts are run in pieces, to bound memory.
    """

    name = "eager"
    """Name in `decoding.runners.RUNNERS`."""
    has_bit_exact_mode = False
    """True if the class takes `exact_width`, the width at which it runs every pass of the whole model."""
    exact_width: int | None = None
    """Width of every whole-model pass after the prompt in bit-exact mode; None in normal mode."""
    block_call: BlockCall | None = None
    """How a block is called in fixed-shape passes; None if the runner has none."""
    buckets: Buckets | None = None
    """The shapes to which passes are padded; None if each pass runs in its own shape."""
    attends_by_position = False
    """True if layers attend by the CPU kernel, and get positions in place of masks in fixed-shape passes."""
    reads_all_slots = False
    """True if the number of slots that a fixed-shape pass reads is data, so that one shape serves all contexts."""
    records = False
    """True if each shape of pass is recorded at its first run."""

    def __init__(self, mask_kinds: MaskKinds | None = None, device: torch.device | None = None) -> None:
        self._mask_kinds = mask_kinds

    def new_cache(self, num_layers: int, capacity: int, num_rows: int = 1) -> KVCache:
        """Return an empty cache for a sequence of at most `capacity` tokens.

        With `num_rows` above 1 its `storage` is the memory of several sequences, one row each.
        """
        return KVCache(num_layers, capacity, Storage(num_layers, capacity, num_rows=num_rows))

    def drop_recordings(self) -> None:
        """Prepare every pass again when it is next run, in new memory: weights were moved or changed."""

    def temporary_memory(self) -> AbstractContextManager[None]:
        """Drop, at the end of the context, the memory of caches that was made in it, and none that was there before."""
        return nullcontext()

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
        """Run `part` on `token_ids` [1, width] in the slots from `start`.

        `last_only` restricts the logits to the last position. `states` are known states for parts that resume. `looks`
        announces that the confidence of the logits will be read.
        """
        width = token_ids.shape[1]
        if not last_only or width <= MAX_PASS_WIDTH:
            return self._run(part, token_ids, cache, start, last_only=last_only, states=states)
        tapped, logits = [], None
        for first in range(0, width, MAX_PASS_WIDTH):
            piece = slice(first, first + MAX_PASS_WIDTH)
            known = None if states is None else states[..., piece, :]
            outputs = self._run(part, token_ids[:, piece], cache, start + first, last_only=True, states=known)
            logits = outputs.logits
            if outputs.states is not None:
                tapped.append(outputs.states)
        assert logits is not None, "there is at least one piece"
        return Outputs(logits, torch.cat(tapped, dim=-2) if tapped else None)

    def _run(
        self, part: Part, token_ids: Tensor, cache: KVCache, start: int, *, last_only: bool, states: Tensor | None
    ) -> Outputs:
        width = token_ids.shape[1]
        cache.cover(start, width)
        positions = torch.arange(start, start + width, device=token_ids.device)[None]
        outputs = part.compute(Inputs(token_ids, positions, cache, int(last_only), states))
        return Outputs(outputs.logits[0], outputs.states)

    def write_greedily(self, part: Part, token_ids: Tensor, cache: KVCache, start: int, num_tokens: int) -> Written:
        """Let `part` draft `num_tokens` greedy tokens after `token_ids` [1, 1] at `start`, without waiting for the device."""

        def step(token_ids: Tensor, index: int) -> Written:
            return one_token(self._run(part, token_ids, cache, start + index, last_only=True, states=None))

        return write_by(step, token_ids, num_tokens)

    def run_shared_pass(self, part: Part, passes: Mapping[int, PassRequest], memory: Storage) -> dict[int, Outputs]:
        """Run `part` once for several sequences, keyed by their rows in `memory`.

        Return what `run` would return for each. The sequences' caches must be rows of `memory`, their prompts already
        written. Raises `UnsupportedRunnerError` if the model's masks are unknown.
        """
        rows, cache = Rows.of(passes), KVCache(len(memory.layers), memory.capacity, memory)
        outputs = compute_rows(part, RowInputs.of(passes, rows), cache, self._known_masks(), rows)
        return split_rows(outputs, passes, rows)

    def write_together(
        self, part: Part, passes: Mapping[int, PassRequest], memory: Storage, num_tokens: int
    ) -> dict[int, Written]:
        """Let `part` draft greedy tokens for several sequences, each after the single token of its request.

        Every sequence gets the same number of tokens: at least one, at most `num_tokens`. Does not wait for the device.
        """
        rows, cache = Rows.of(passes, num_tokens=num_tokens), KVCache(len(memory.layers), memory.capacity, memory)
        written = compute_chains(part, RowInputs.of(passes, rows), cache, self._known_masks(), rows)
        return split_chains(written, passes, rows)

    def _known_masks(self) -> MaskKinds:
        if self._mask_kinds is None:
            raise UnsupportedRunnerError("the attention masks of this model are unknown: its sequences run one by one")
        return self._mask_kinds


RunnerFactory = Callable[[MaskKinds, torch.device], EagerRunner]
"""Makes the runner of a model whose layers attend as the first argument says."""
