"""A feature head at work: one pass of it in decoding, and many of its rounds at once on sequences that are known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache

from decoding.cache.kv_cache import KVCache
from decoding.errors import UnsupportedModelError
from decoding.runners.contract import Inputs, Outputs
from decoding.target.feature_head import FeatureHead, Join, states_before
from decoding.target.parts import ModelPart
from decoding.target.stand_ins import Head, Identity, PassState

if TYPE_CHECKING:
    from decoding.target.target import Target


class FeatureView:
    """A feature head with the target's embeddings, final norm and LM head; none of the target's blocks run.

    The head's keys and values are in the cache's branch. The head has the last block index, so that it receives the mask and rotary
    embeddings of the block it was copied from.
    """

    def __init__(self, target: Target, head: FeatureHead) -> None:
        self._target, current = target, PassState()
        joining = head.block
        block = target.prepare_block(joining.block, target.num_layers - 1, around=joining.around)
        passed_by = [Identity(each, target.anatomy.block_outputs) for each in target.stack[:-1]]
        blocks = [*passed_by, Join(Head(block), current)]
        self._part = target.part(blocks, current, drafts=True, vocabulary=head.vocabulary)

    def run(self, token_ids: Tensor, cache: KVCache, start: int, states: Tensor, *, looks: bool = False) -> Outputs:
        """Run the head on `token_ids` [1, width] from position `start`; logits [1, vocabulary] are those after the last.

        `states` [.., width, hidden] are those of the position before each token. The outputs' states are the head's own, one per
        token; `looks` is as in `EagerRunner.run`.
        """
        return self._target.run(self._part, token_ids, cache, start, last_only=True, states=states, looks=looks)


def unrolled(
    target: Target, head: FeatureHead, token_ids: Tensor, states: Tensor, num_steps: int, *, first: int = 0
) -> Iterator[Tensor]:
    """Yield the logits [batch, length - first, vocabulary] of steps 1 to `num_steps` of the rounds that reach each position.

    `states` [.., batch, length, hidden] are the target's last ones of `token_ids` [batch, length]. Step 1 reads them; step n at a
    position reads what step n - 1 put out at the position before, in a round that began n - 1 tokens earlier and drafted the
    sequence's own tokens, and attends to what such a round has in its cache (training-time test of EAGLE-3, arXiv 2503.01840,
    section 3.2). Gradients flow through all steps. Raises `UnsupportedModelError` for a model with an `unmaskable_reason`.
    """
    mask_kinds = target.mask_kinds
    if mask_kinds is None or target.unmaskable_reason is not None:
        raise UnsupportedModelError(f"no steps of a feature head can be unrolled: {target.unmaskable_reason}")
    lm_head = None if head.vocabulary is None else target.lm_heads.rows_for(head.vocabulary)
    current, cache = PassState(), DynamicCache()
    passed_by = [Identity(each, target.anatomy.block_outputs) for each in list(target.blocks)[:-1]]
    blocks = [*passed_by, Join(Head(head.block), current)]
    part = ModelPart(target.model, target.anatomy.path, blocks, current, lm_head=lm_head)
    length = token_ids.shape[1]
    positions = torch.arange(length, device=token_ids.device)[None].expand(token_ids.shape[0], -1)
    for step in range(1, num_steps + 1):
        allowed = _unrolled_mask(step, length, mask_kinds.windows[-1], token_ids.device)
        mask = mask_kinds.formed(allowed).expand(token_ids.shape[0], -1, -1, -1)
        outputs = part.compute(
            Inputs(token_ids, positions, cache, length - first, states_before(states), masks=(mask,))
        )
        assert outputs.states is not None, "the head records its states"
        states = outputs.states
        yield outputs.logits


def _unrolled_mask(step: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Return the mask [length, step * length] of step `step`, counted from 1: True where a position attends to a key.

    Step n at position p belongs to the round that began at position p - n + 1. Such a round has read the positions up to its
    beginning by its first step, and each later position by one more step. The keys are those of all positions, step after step.
    `window` is the number of positions that the layer attends to, or None for all.
    """
    position = torch.arange(length, device=device)[:, None]
    key = torch.arange(length, device=device)[None]
    begun = position - step + 1
    near = torch.ones_like(key <= position) if window is None else key > position - window
    own = [key == begun + number for number in range(1, step)]
    return torch.cat([(key <= begun) & near, *(each & near for each in own)], dim=-1)
