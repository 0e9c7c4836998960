"""Heads in memory, and a feature head at work.

An exit head is a block of the model's own class between the states at an exit and the target's own final norm and LM head.

A feature head is one block that drafts on from the target's last hidden states (after EAGLE, arXiv 2401.15077). It reads the
state of a position beside the embedding of the token after it, and predicts the token after that. Its own output
is the state that its next step reads, so that no block of the target runs while it drafts. As in EAGLE one linear layer joins both
inputs, which are normalised first, as in EAGLE-3 (arXiv 2503.01840). The layer begins as the sum of both, and the block as a copy
of the target's last one (our formulation). Adding the joined inputs to the state in place of replacing it learned more slowly on
the demo model: the state says what the last token is, and the head has to say what follows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from decoding.cache.kv_cache import KVCache
from decoding.errors import UnsupportedModelError
from decoding.runners.contract import Inputs, Outputs
from decoding.target.lm_heads import DraftVocabulary
from decoding.target.parts import ModelPart
from decoding.target.stand_ins import Head, PassState, StandIn, first_of, shallow_copy

if TYPE_CHECKING:
    from decoding.target.target import Target

EPSILON = 1e-6


@dataclass(frozen=True, eq=False)
class ExitHead:
    """A head between the states at an exit and the target's own final norm and LM head."""

    block: nn.Module
    """Block of the model's own class, with keys and values of its own."""
    vocabulary: DraftVocabulary | None = None
    """Tokens that it drafts from; None for all."""


def new_exit_head(target: Target, vocabulary: DraftVocabulary | None = None) -> ExitHead:
    """Return a copy of the last block, in its precision, as a new exit head that drafts from `vocabulary`, or from all tokens."""
    return ExitHead(copy.deepcopy(target.blocks[-1]).requires_grad_(True).eval(), vocabulary)


class FeatureBlock(nn.Module):
    """Joins states and token embeddings, and runs `block`, one of the model's own class, on the result."""

    def __init__(self, block: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.state_norm = nn.RMSNorm(hidden_size, eps=EPSILON)
        self.token_norm = nn.RMSNorm(hidden_size, eps=EPSILON)
        self.join = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.block = block
        with torch.no_grad():
            self.join.weight.copy_(torch.eye(hidden_size).repeat(1, 2))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the block where there is none here: families read some in their loop."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "block":
                raise
            return getattr(self.block, name)

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run on `inputs` [.., width, 2 * hidden]: the state of each position before, then the embedding of its token."""
        states, tokens = inputs.chunk(2, dim=-1)
        joined = self.join(torch.cat([self.state_norm(states), self.token_norm(tokens)], dim=-1))
        return self.block(joined, *args, **kwargs)

    def around(self, block: nn.Module) -> FeatureBlock:
        twin = cast(FeatureBlock, shallow_copy(self))
        twin.block = block
        return twin


@dataclass(frozen=True, eq=False)
class FeatureHead:
    """A head between the target's last hidden states and its own final norm and LM head."""

    block: FeatureBlock
    """Has keys and values of its own."""
    vocabulary: DraftVocabulary | None = None
    """Tokens that it drafts from; None for all."""


class Join(StandIn):
    """Runs a feature head on the `current` pass's known states and the incoming embeddings, and records its output states."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run on the embeddings `hidden_states` [.., width, hidden] and the block's other arguments."""
        current = self.current
        assert current.states is not None, "a feature head is given the states"
        states = current.states.to(hidden_states.device)
        output = self.block(torch.cat([states, hidden_states], dim=-1), *args, **kwargs)
        current.tapped.append(first_of(output))
        return output


def states_before(states: Tensor) -> Tensor:
    """Return for each position of `states` [.., width, hidden] the state of the position before it; zeros for the first."""
    return torch.cat([torch.zeros_like(states[..., :1, :]), states[..., :-1, :]], dim=-2)


def new_feature_head(target: Target, vocabulary: DraftVocabulary | None = None) -> FeatureHead:
    """Return a new head around a copy of the last block, in its precision, which drafts from `vocabulary`, or from all tokens."""
    block = copy.deepcopy(target.blocks[-1])
    like = next(block.parameters())
    joining = FeatureBlock(block, target.config.hidden_size).to(like.device, like.dtype)
    return FeatureHead(joining.requires_grad_(True).eval(), vocabulary)


class FeatureView:
    """A feature head with the target's embeddings, final norm and LM head; none of the target's blocks run.

    The head's keys and values are in the cache's branch. The head has the last block index, so that it receives the mask and rotary
    embeddings of the block it was copied from.
    """

    def __init__(self, target: Target, head: FeatureHead) -> None:
        self._target, current = target, PassState()
        joining = head.block
        block = target.prepare_block(joining.block, target.num_layers - 1, around=joining.around)
        blocks = [*target.passed_by(target.stack[:-1]), Join(Head(block), current=current)]
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
    blocks = [*target.passed_by(list(target.blocks)[:-1]), Join(Head(head.block), current=current)]
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
