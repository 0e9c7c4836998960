"""Runs each pass in the shape it has, and long prompts in pieces to bound memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from decoding.acceptance import accept_greedy
from decoding.cache.kv_cache import KVCache, Storage
from decoding.errors import UnsupportedRunnerError
from decoding.runners.contract import Inputs, Outputs, Part, PassRequest, Written
from decoding.runners.features import NO_FEATURES, SpeedFeatures
from decoding.runners.greedy_chain import one_token, write_by
from decoding.runners.masks import MaskKinds
from decoding.runners.shared_pass import (
    RowInputs,
    Rows,
    compute_chains,
    compute_rows,
    split_chains,
    split_rows,
    unbatch,
)

MAX_PASS_WIDTH = 1024
"""Maximum number of prompt positions per pass: enough to saturate any device, with modest activation memory."""


class EagerRunner:
    """The plain runner: no preparation, no padding, any shape."""

    name = "eager"
    has_bit_exact_mode = False
    block_call = None
    exact_width = None
    buckets = None
    attends_by_position = False
    reads_all_slots = False
    records = False

    def __init__(
        self,
        mask_kinds: MaskKinds | None = None,
        device: torch.device | None = None,
        *,
        features: SpeedFeatures = NO_FEATURES,
    ) -> None:
        self._mask_kinds = mask_kinds
        self.features = features

    def new_cache(self, num_layers: int, capacity: int, num_rows: int = 1) -> KVCache:
        """Return a cache of exactly this capacity."""
        return KVCache(num_layers, capacity, Storage(num_layers, capacity, num_rows=num_rows))

    def reserve(self, num_layers: int, capacity: int, num_rows: int = 1) -> None:
        """Do nothing: every cache has memory of its own."""

    def drop_recordings(self) -> None:
        """Do nothing: there are none."""

    def temporary_memory(self) -> AbstractContextManager[None]:
        """Do nothing: the memory of a cache is dropped with it."""
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
        """Run a pass; see `Runner.run`.

        A wide pass is run in pieces if only the last logits are needed. The confidence is left to the reader.
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

    def write_greedily(
        self, part: Part, token_ids: Tensor, cache: KVCache, start: int, num_tokens: int, *, looks: bool = False
    ) -> Written:
        """Draft greedily with one pass per token; see `Runner.write_greedily`."""

        def step(token_ids: Tensor, index: int) -> Written:
            outputs = self._run(part, token_ids, cache, start + index, last_only=True, states=None)
            return one_token(outputs, looks=looks)

        return write_by(step, token_ids, num_tokens)

    def run_tree(self, part: Part, token_ids: Tensor, cache: KVCache, start: int, positions: Sequence[int]) -> Outputs:
        """Run a chain and its leaves under a mask; see `Runner.run_tree`.

        Raises `UnsupportedRunnerError` if the model's masks are unknown.
        """
        width, device = token_ids.shape[1], token_ids.device
        cache.cover(start, width)
        slots, last = torch.arange(start, start + width, device=device), torch.tensor([width - 1], device=device)
        at = torch.tensor(positions, device=device)
        window = cache.window
        window.begin(slots, last, slots[-1:], self._known_masks().masks(slots, start + width, at))
        try:
            return unbatch(part.compute(Inputs(token_ids, at[None], cache, 0, None, last, window.masks)))
        finally:
            window.end_pass()

    def run_round(
        self, draft: Part, whole: Part, token_ids: Tensor, cache: KVCache, start: int, num_tokens: int
    ) -> Tensor:
        """Draft, then verify; see `Runner.run_round`."""
        drafted = self.write_greedily(draft, token_ids, cache, start, num_tokens).token_ids
        outputs = self.run(whole, torch.cat([token_ids, drafted[None]], dim=1), cache, start)
        return accept_greedy(drafted, outputs.choices)

    def _run(
        self, part: Part, token_ids: Tensor, cache: KVCache, start: int, *, last_only: bool, states: Tensor | None
    ) -> Outputs:
        width = token_ids.shape[1]
        cache.cover(start, width)
        positions = torch.arange(start, start + width, device=token_ids.device)[None]
        return unbatch(part.compute(Inputs(token_ids, positions, cache, int(last_only), states)))

    def run_shared_pass(self, part: Part, passes: Mapping[int, PassRequest], memory: Storage) -> dict[int, Outputs]:
        """Run a shared pass; see `Runner.run_shared_pass`.

        Raises `UnsupportedRunnerError` if the model's masks are unknown.
        """
        rows, cache = Rows.of(passes), KVCache(len(memory.layers), memory.capacity, memory)
        outputs = compute_rows(part, RowInputs.of(passes, rows), cache, self._known_masks(), rows)
        return split_rows(outputs, passes, rows)

    def write_together(
        self, part: Part, passes: Mapping[int, PassRequest], memory: Storage, num_tokens: int
    ) -> dict[int, Written]:
        """Draft all tokens; see `Runner.write_together`."""
        rows, cache = Rows.of(passes, num_tokens=num_tokens), KVCache(len(memory.layers), memory.capacity, memory)
        written = compute_chains(part, RowInputs.of(passes, rows), cache, self._known_masks(), rows)
        return split_chains(written, passes, rows)

    def _known_masks(self) -> MaskKinds:
        if self._mask_kinds is None:
            raise UnsupportedRunnerError(
                "the attention masks of this model are unknown: its sequences run one by one, as chains"
            )
        return self._mask_kinds
